// Requests to the server.

export async function get(path, parameters = {}) {
  const given = Object.entries(parameters).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const query = new URLSearchParams(given).toString();
  return answer(await fetch(query ? `${path}?${query}` : path));
}

export async function post(path, body, token) {
  const headers = { "content-type": "application/json", authorization: `Bearer ${token}` };
  return answer(await fetch(path, { method: "POST", headers, body: JSON.stringify(body) }));
}

async function answer(response) {
  let found;
  try {
    found = await response.json();
  } catch {
    throw new Error(`the server answered with status ${response.status}`);
  }
  if (!response.ok) throw Object.assign(new Error(found.error), { status: response.status });
  return found;
}

const LATE_MS = 5000;

/** Follow the status: calls `onStatus(status)`, and `onLost(why)` while there is no status. Reconnects by itself. */
export function follow(onStatus, onLost) {
  let source = null,
    heardMs = Date.now();
  const open = () => {
    source?.close();
    source = new EventSource("api/events");
    source.onmessage = (event) => {
      heardMs = Date.now();
      onStatus(JSON.parse(event.data));
    };
    source.addEventListener("lost", (event) => {
      heardMs = Date.now();
      onLost(JSON.parse(event.data));
    });
  };
  open();
  setInterval(() => {
    if (Date.now() - heardMs < LATE_MS) return;
    onLost("the dashboard does not answer: is `rollq dashboard` still running?");
    if (source.readyState === EventSource.CLOSED || Date.now() - heardMs > 2 * LATE_MS) {
      heardMs = Date.now() - LATE_MS;
      open();
    }
  }, 1000);
}
