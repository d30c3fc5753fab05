// Shows an answer token by token: accepted draft tokens, the target's own tokens, and rejected drafts.
export class Answer {
  constructor(box, rejected, tally) {
    this.box = box;
    this.rejected = rejected;
    this.tally = tally;
    this.current = null; // the token whose rejected draft is shown
    box.addEventListener("pointerover", (event) => this.show(event.target.closest(".replaced")));
    box.addEventListener("click", (event) => this.show(event.target.closest(".replaced")));
    box.addEventListener("keydown", (event) => this.onKey(event));
    this.begin();
  }

  begin() {
    this.box.replaceChildren();
    this.tally.replaceChildren();
    this.tokens = 0;
    this.accepted = 0;
    this.began = performance.now();
    this.show(null);
  }

  add(chunk) {
    const trace = chunk.slipstream ?? { pieces: [] };
    this.tokens += trace.tokens ?? 0;
    this.accepted += trace.accepted ?? 0;
    trace.pieces.forEach(([text, drafted], index) => this.addPiece(text, drafted, trace.rejected?.[index] ?? ""));
    if (chunk.usage) {
      this.rejectedCount = chunk.usage.completion_tokens_details?.rejected_prediction_tokens ?? 0;
    }
  }

  addPiece(text, drafted, rejected) {
    const token = document.createElement("span");
    token.className = drafted ? "token accepted" : "token own";
    token.textContent = text;
    if (rejected) {
      token.classList.add("replaced");
      token.dataset.rejected = rejected;
    }
    const follows = this.box.scrollHeight - this.box.scrollTop - this.box.clientHeight < 40;
    this.box.append(token);
    if (follows) this.box.scrollTop = this.box.scrollHeight;
  }

  end(how) {
    const seconds = (performance.now() - this.began) / 1000;
    const own = this.tokens - this.accepted;
    this.tally.textContent = `${how}: ${this.tokens} tokens in ${seconds.toFixed(1)} s, ` +
      `${this.accepted} drafted and accepted, ${own} the target's own` +
      (this.rejectedCount === undefined ? "" : `, ${this.rejectedCount} draft tokens rejected`);
    this.rejectedCount = undefined;
  }

  fail(why) {
    const said = document.createElement("span");
    said.className = "failed";
    said.textContent = `Failed: ${why}`;
    this.tally.replaceChildren(said);
  }

  // Left and right move between rejected drafts; home and end select the first and the last.
  onKey(event) {
    const stops = [...this.box.querySelectorAll(".replaced")];
    const at = stops.indexOf(this.current);
    const goal = {
      ArrowRight: Math.min(at + 1, stops.length - 1),
      ArrowLeft: Math.max(at - 1, 0),
      Home: 0,
      End: stops.length - 1,
    }[event.key];
    if (goal === undefined || !stops.length) return;
    event.preventDefault();
    this.show(stops[goal]);
    stops[goal].scrollIntoView({ block: "nearest" });
  }

  show(token) {
    if (token === null && this.current?.isConnected) return; // keep showing the last rejected draft
    this.current?.classList.remove("current");
    this.current = token;
    this.rejected.replaceChildren();
    if (!token) return;
    token.classList.add("current");
    const draft = document.createElement("del");
    draft.textContent = onOneLine(token.dataset.rejected);
    this.rejected.append("Instead of “", onOneLine(token.textContent), "” the draft had “", draft, "”.");
  }
}

function onOneLine(text) {
  return text.replaceAll("\n", "↵");
}
