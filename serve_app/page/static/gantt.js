// Draws one line per actor with its activity in the last seconds.
const NAMESPACE = "http://www.w3.org/2000/svg";
const CLASSES = { draft: "draft", "draft ahead": "ahead", verify: "verify" };

export function svg(name, attributes) {
  const made = document.createElementNS(NAMESPACE, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

export function showGantt(box, state) {
  box.replaceChildren(...state.tracks.map((track) => trackOf(track, state.window_ms)), axis(state.window_ms));
}

function trackOf(track, windowMs) {
  const line = document.createElement("div");
  line.className = "track";
  const name = document.createElement("span");
  name.className = "name";
  name.textContent = track.actor;
  const picture = svg("svg", { viewBox: `0 0 ${windowMs} 10`, preserveAspectRatio: "none", role: "img" });
  picture.setAttribute("aria-label", `${track.actor}: ${inWords(track, windowMs)}`);
  for (const [stage, start, length, sessions] of track.bars) {
    const bar = svg("rect", { x: start, y: 1, width: Math.max(length, windowMs / 1500), height: 8, class: CLASSES[stage] });
    const title = svg("title", {});
    title.textContent = `${stage}, ${length.toFixed(1)} ms, ${sessions} ${sessions === 1 ? "session" : "sessions"}`;
    bar.append(title);
    picture.append(bar);
  }
  line.append(name, picture);
  return line;
}

// Returns a text alternative to the bars: the share of time in each stage.
function inWords(track, windowMs) {
  const totals = {};
  for (const [stage, , length] of track.bars) totals[stage] = (totals[stage] ?? 0) + length;
  const shares = Object.entries(totals).map(([stage, ms]) => `${stage} ${Math.round(100 * ms / windowMs)} % of the time`);
  return shares.join(", ") || "nothing";
}

function axis(windowMs) {
  const line = document.createElement("div");
  line.className = "axis";
  line.setAttribute("aria-hidden", "true");
  for (let part = 0; part <= 3; part += 1) {
    const tick = document.createElement("span");
    tick.textContent = part === 3 ? "now" : `−${((3 - part) * windowMs / 3000).toFixed(0)} s`;
    line.append(tick);
  }
  return line;
}
