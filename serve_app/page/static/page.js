// Entry point: requests the state once a second while the page is visible, and shows it.
import { failureOf, fetchWithKey } from "./access.js";
import { startAsking } from "./ask.js";
import { showGantt } from "./gantt.js";
import { showState } from "./pools.js";

const PERIOD_MS = 1000;
const element = (id) => document.getElementById(id);

async function showNow() {
  if (document.hidden) return;
  try {
    const response = await fetchWithKey("page/state");
    if (!response.ok) throw new Error(await failureOf(response));
    const state = await response.json();
    showState(state);
    if (!element("pause").checked) showGantt(element("gantt"), state);
    say(`${state.targets.length} ${plural("target", state.targets.length)}, ` +
      `${state.drafters.length} ${plural("drafter", state.drafters.length)}`);
  } catch (error) {
    say(`The server does not answer: ${error.message}`);
  }
}

function plural(word, count) {
  return count === 1 ? word : `${word}s`;
}

// Sets the status only if its text differs, since screen readers announce every change.
function say(words) {
  const state = element("state");
  if (state.textContent !== words) state.textContent = words;
}

async function run() {
  for (;;) {
    const began = performance.now();
    await showNow();
    await new Promise((done) => setTimeout(done, Math.max(100, PERIOD_MS - (performance.now() - began))));
  }
}

startAsking();
run();
