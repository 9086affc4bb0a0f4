// Talks to the server: one streamed chat completion, and what went wrong in words.

const TITLES = {
  0: "The server does not answer",
  400: "The server refused the request",
  401: "The server asks for a key",
  404: "There is no such model",
  413: "The request is too long",
  429: "The server is busy",
  503: "The server is shutting down",
};

export class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
    this.title = TITLES[status] ?? "The server failed";
  }
}

const GONE = "Is `foredraft serve` still running? Try again once it is.";

function headers(key) {
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function request(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    throw error.name === "AbortError" ? error : new ServerError(0, GONE);
  }
  if (response.ok) return response;
  const told = await response.json().catch(() => null);
  throw new ServerError(response.status, told?.error?.message ?? `${response.status} ${response.statusText}`);
}

export async function modelNames(key) {
  const list = await (await request("/v1/models", { headers: headers(key) })).json();
  return list.data.map((model) => model.id);
}

// The chunks of an answer; an answer that breaks off raises a ServerError.
export async function* chunks(body, key, signal) {
  const options = { method: "POST", headers: headers(key), body: JSON.stringify(body), signal };
  const response = await request("/v1/chat/completions", options);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { done, value } = await reader.read().catch((error) => {
      throw error.name === "AbortError" ? error : new ServerError(0, "The connection was lost in the middle of the answer.");
    });
    if (done) throw new ServerError(0, "The answer broke off before its end.");
    buffer += value;
    const events = buffer.split("\n\n");
    buffer = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ServerError(500, chunk.error.message);
      yield chunk;
    }
  }
}
