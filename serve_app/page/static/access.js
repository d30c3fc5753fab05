// Requests to this server, with an API key if it requires one.
const STORED = "slipstream-api-key";
let asking = null; // one dialog for all waiting requests

export async function fetchWithKey(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem(STORED);
    const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
    const response = await fetch(path, { ...options, headers });
    if (response.status !== 401) return response;
    if (key === sessionStorage.getItem(STORED)) sessionStorage.removeItem(STORED);
    asking ??= askForKey().finally(() => { asking = null; });
    await asking;
  }
}

function askForKey() {
  const dialog = document.getElementById("key-dialog");
  const input = document.getElementById("key");
  return new Promise((done) => {
    dialog.addEventListener("close", () => {
      if (input.value) sessionStorage.setItem(STORED, input.value);
      input.value = "";
      done();
    }, { once: true });
    dialog.addEventListener("cancel", (event) => event.preventDefault());
    dialog.showModal();
  });
}

// The error message of an unsuccessful response.
export async function failureOf(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `${response.status} ${text.slice(0, 200)}`;
  }
}
