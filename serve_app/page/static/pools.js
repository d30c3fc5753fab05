// Shows the figures, the acceptance bars and the tables of both pools.
import { svg } from "./gantt.js";

const HISTORY = 120; // samples, one per second
const speeds = [];
const element = (id) => document.getElementById(id);

export function showState(state) {
  element("model").textContent = state.model;
  element("tokens-per-s").textContent = number(state.tokens_per_s);
  element("busy").textContent = percent(state.busy);
  element("accepted").textContent = percent(state.accepted);
  showSpeed(state.tokens_per_s ?? 0);
  showAcceptance(state.acceptance);
  showRows(element("targets"), state.targets.map((one) => [
    one.name, one.sessions, one.queued, percent(one.busy), number(one.tokens_per_s), percent(one.cache),
    one.is_drafted_for ? "on" : "off", `${one.gain.toFixed(2)}×`,
  ]));
  showRows(element("drafters"), state.drafters.map((one) => [
    one.name, one.sessions, one.method, number(one.draft_tokens_per_s), percent(one.ahead),
  ]));
  showLearning(state.learning);
  element("unlisted").textContent = state.unlisted ? `and ${state.unlisted} more replicas` : "";
}

function showLearning(learning) {
  element("learning").hidden = learning === null;
  if (learning === null) return;
  const share = (value) => (value === null ? "–" : value.toFixed(3));
  const running = learning.progress === null ? "" : ` ${percent(learning.progress)}`;
  showRows(element("trainer"), [[
    `${learning.phase}${running}`, learning.examples, learning.new_examples, learning.version || "as configured",
    share(learning.before), share(learning.after),
  ]]);
}

function showRows(body, rows) {
  body.replaceChildren(...rows.map(([name, ...values]) => {
    const row = document.createElement("tr");
    const head = document.createElement("th");
    head.scope = "row";
    head.textContent = name;
    row.append(head, ...values.map((value) => {
      const cell = document.createElement("td");
      cell.textContent = value;
      return cell;
    }));
    return row;
  }));
}

function showSpeed(tokensPerS) {
  speeds.push(tokensPerS);
  if (speeds.length > HISTORY) speeds.shift();
  const most = Math.max(1, ...speeds);
  const step = 300 / (HISTORY - 1);
  const first = HISTORY - speeds.length;
  const points = speeds.map((speed, index) => `${(first + index) * step},${58 - 56 * speed / most}`).join(" ");
  const chart = element("speed");
  chart.replaceChildren(svg("polyline", { points }));
  chart.setAttribute("aria-label", `Tokens per second over the last two minutes, at most ${number(most)}`);
}

function showAcceptance(chances) {
  element("acceptance").replaceChildren(...chances.map((chance, index) => {
    const item = document.createElement("li");
    const bar = document.createElement("span");
    bar.className = "bar";
    bar.style.height = `${5.5 * chance}rem`;
    const position = document.createElement("span");
    position.className = "position";
    position.textContent = String(index + 1);
    const value = document.createElement("span");
    value.textContent = percent(chance);
    item.append(value, bar, position);
    return item;
  }));
  element("acceptance-hint").textContent = chances.length
    ? "Acceptance probability of each draft token after accepted tokens, since the replicas started."
    : "No data yet: too few blocks were verified.";
}

function percent(share) {
  return share === null ? "–" : `${Math.round(100 * share)} %`;
}

function number(value) {
  return value === null ? "–" : value.toFixed(1);
}
