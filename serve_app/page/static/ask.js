// Sends the prompt as a streaming chat completion, and shows the answer token by token.
import { failureOf, fetchWithKey } from "./access.js";
import { Answer } from "./answer.js";
import { eventsOf } from "./events.js";

const element = (id) => document.getElementById(id);

export function startAsking() {
  const form = element("ask");
  const answer = new Answer(element("answer"), element("rejected"), element("tally"));
  let stopping = null;

  const stop = () => stopping?.abort();
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (stopping) return;
    stopping = new AbortController();
    setBusy(true);
    answer.begin();
    try {
      await stream(answer, stopping.signal);
    } catch (error) {
      if (error.name === "AbortError") answer.end("stopped");
      else answer.fail(error.message);
    } finally {
      stopping = null;
      setBusy(false);
    }
  });
  element("stop").addEventListener("click", stop);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") stop();
    if (event.key === "Enter" && event.ctrlKey && event.target === element("prompt")) form.requestSubmit();
  });
}

function setBusy(busy) {
  element("send").disabled = busy;
  element("stop").disabled = !busy;
  element("answer").setAttribute("aria-busy", String(busy));
}

async function stream(answer, signal) {
  const response = await fetchWithKey("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(await requestBody()),
    signal,
  });
  if (!response.ok) throw new Error(await failureOf(response));
  let finish = null;
  for await (const data of eventsOf(response)) {
    if (data === "[DONE]") break;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    answer.add(chunk);
    finish = chunk.choices[0]?.finish_reason ?? finish;
  }
  answer.end(finish === "length" ? "stopped at the token limit" : "done");
}

async function requestBody() {
  const most = element("max-draft").value;
  const models = await (await fetchWithKey("v1/models")).json();
  return {
    model: models.data[0].id,
    messages: [{ role: "user", content: element("prompt").value }],
    max_tokens: Number(element("max-tokens").value),
    temperature: Number(element("temperature").value),
    stream: true,
    stream_options: { include_usage: true },
    speculation: { trace: true, rejected: true, ...(most === "" ? {} : { draft_tokens: Number(most) }) },
  };
}
