// The page's one script: sends a conversation, tints the tokens as they stream, and draws what became of the drafts.

const $ = (id) => document.getElementById(id);
const talk = $("talk");
let messages = [];
let running = null;

function headers() {
  const key = $("key").value;
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    buffer += value;
    const parts = buffer.split("\n\n");
    buffer = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

// What became of the drafts: a step is a run of accepted tokens and the one that ends it.
class Steps {
  constructor() { this.accepted = 0; this.outcomes = []; this.lengths = []; this.tokens = 0; }
  add(origin) {
    this.tokens += 1;
    if (origin === "a") { this.accepted += 1; return; }
    if (origin !== "t") this.outcomes.push({ accepted: this.accepted, rejected: origin === "r" });
    this.accepted = 0;
  }
  get byPosition() {
    const longest = Math.max(0, ...this.outcomes.map((outcome) => outcome.accepted + outcome.rejected));
    const shares = [];
    for (let position = 0; position < longest; position += 1) {
      const right = this.outcomes.filter((outcome) => outcome.accepted > position).length;
      const wrong = this.outcomes.filter((outcome) => outcome.rejected && outcome.accepted === position).length;
      shares.push(right / (right + wrong));
    }
    return shares;
  }
}

function svg(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function drawPositions(shares) {
  const parts = shares.map((share, position) => {
    const width = 250 / Math.max(shares.length, 4);
    return [
      svg("rect", { x: 5 + position * width, y: 95 - 85 * share, width: width - 3, height: 85 * share }),
      svg("text", { x: 5 + position * width, y: 106 }, `${position + 1}: ${Math.round(100 * share)}%`),
    ];
  });
  $("positions").replaceChildren(...parts.flat());
}

function drawLengths(lengths) {
  const shown = lengths.slice(-120);
  const most = Math.max(1, ...shown);
  const points = shown.map((length, step) => `${5 + (250 * step) / Math.max(1, shown.length - 1)},${100 - (90 * length) / most}`);
  const line = points.length ? [svg("path", { class: "line", d: `M${points.join("L")}` })] : [];
  $("lengths").replaceChildren(...line, svg("text", { x: 5, y: 10 }, `${most}`));
}

function box(turn, kind, title) {
  const made = document.createElement("div");
  made.className = `message ${kind}`;
  made.dataset.title = title;
  turn.append(made);
  return made;
}

function speculation(speculating) {
  if (!speculating) return { enabled: false, origins: true };
  const gamma = $("gamma").value;
  return { enabled: true, origins: true, ...(gamma === "" ? {} : { num_speculative_tokens: Number(gamma) }) };
}

async function answer(target, speculating, signal) {
  const body = {
    messages,
    stream: true,
    stream_options: { include_usage: true },
    temperature: Number($("temperature").value),
    max_tokens: Number($("tokens").value),
    speculation: speculation(speculating),
  };
  const response = await fetch("/v1/chat/completions", {
    method: "POST", headers: headers(), body: JSON.stringify(body), signal,
  });
  if (!response.ok) throw new Error((await response.json()).error.message);
  const steps = new Steps();
  let text = "";
  let begin = 0;
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message);
    for (const choice of event.choices) {
      text += choice.delta.content ?? "";
      for (const span of choice.spans ?? []) {
        const part = document.createElement("span");
        part.className = span.origin;
        part.textContent = span.text;
        target.append(part);
        steps.add(span.origin);
      }
      steps.lengths.push(...(choice.draft_lengths ?? []));
    }
    begin ||= performance.now();
    show(speculating, steps, (performance.now() - begin) / 1000, event.usage);
    talk.scrollTop = talk.scrollHeight;
  }
  return text;
}

function show(speculating, steps, seconds, usage) {
  const speed = seconds > 0.05 ? (steps.tokens / seconds).toFixed(1) : "–";
  $(speculating ? "speed" : "plain-speed").textContent = speed;
  if (!speculating) return;
  drawPositions(steps.byPosition);
  drawLengths(steps.lengths);
  if (usage) {
    $("tau").textContent = usage.speculation.mean_acceptance_length.toFixed(2);
    $("rate").textContent = `${Math.round(100 * usage.speculation.acceptance_rate)}%`;
  }
}

async function send(prompt) {
  messages.push({ role: "user", content: prompt });
  const asked = document.createElement("div");
  const turn = document.createElement("div");
  asked.className = turn.className = "turn";
  talk.append(asked, turn);
  box(asked, "user", "you").append(prompt);
  const target = box(turn, "assistant", "with speculation");
  const beside = $("beside").checked ? box(turn, "assistant plain", "without") : null;
  running = new AbortController();
  $("stop").disabled = false;
  try {
    // One after the other: side by side they would take each other's time.
    const text = await answer(target, true, running.signal);
    if (beside) await answer(beside, false, running.signal);
    messages.push({ role: "assistant", content: text });
  } catch (error) {
    messages.pop();
    const stopped = error.name === "AbortError";
    if (!stopped) target.classList.add("error");
    target.append(stopped ? " (stopped)" : error.message);
  }
  running = null;
  $("stop").disabled = true;
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const prompt = $("prompt").value.trim();
  if (!prompt || running) return;
  $("prompt").value = "";
  send(prompt);
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); $("ask").requestSubmit(); }
});
$("stop").addEventListener("click", () => running?.abort());
$("reset").addEventListener("click", () => { running?.abort(); messages = []; talk.replaceChildren(); });

fetch("/v1/models", { headers: headers() })
  .then((response) => response.json())
  .then((list) => { $("model").textContent = list.data?.[0]?.id ?? ""; })
  .catch(() => {});
