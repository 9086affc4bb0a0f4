// The conversation: sends it, tints tokens as they stream, and runs it again without speculation on demand.

import { Steps, drawLengths, drawPositions } from "./figures.js";
import { ServerError, chunks, modelNames } from "./stream.js";

const $ = (id) => document.getElementById(id);
const MEANING = { a: "drafted and accepted", r: "corrected by the model", b: "bonus after a whole draft", t: "no draft" };
const talk = $("talk");
const empty = $("empty");
let messages = [];
let running = null;

function element(name, className, ...content) {
  const made = document.createElement(name);
  made.className = className;
  made.append(...content);
  return made;
}

function follow() {
  if (talk.scrollHeight - talk.scrollTop - talk.clientHeight < 120) talk.scrollTop = talk.scrollHeight;
}

function requestBody(speculating, seed) {
  const gamma = $("gamma").value;
  const chosen = gamma === "" ? {} : { num_speculative_tokens: Number(gamma) };
  return {
    messages,
    stream: true,
    stream_options: { include_usage: true },
    temperature: Number($("temperature").value),
    max_tokens: Number($("tokens").value) || null,
    seed, // the same for both runs: sampled texts are the same, too
    speculation: { origins: true, enabled: speculating, ...(speculating ? chosen : {}) },
  };
}

// One answer, on its way into a box.
class Answer {
  constructor(turn, title, speculating) {
    this.speculating = speculating;
    this.steps = new Steps();
    this.text = "";
    this.finishReason = null;
    this.arrived = []; // [time, tokens so far]
    this.body = element("div", "text");
    this.foot = element("p", "foot faint", "waiting for the first token");
    this.box = element("article", `message assistant${speculating ? "" : " plain"}`, element("h3", "", title), this.body, this.foot);
    turn.append(this.box);
  }

  async run(seed, signal) {
    try {
      for await (const chunk of chunks(requestBody(this.speculating, seed), $("key").value, signal)) {
        chunk.choices.forEach((choice) => this.take(choice));
        this.show();
      }
    } finally {
      this.show(true);
    }
  }

  take(choice) {
    this.text += choice.delta.content ?? "";
    this.finishReason = choice.finish_reason ?? this.finishReason;
    this.steps.lengths.push(...(choice.draft_lengths ?? []));
    for (const span of choice.spans ?? []) {
      const token = element("span", span.origin, span.text);
      token.title = MEANING[span.origin];
      this.body.append(token);
      this.steps.add(span.origin);
    }
    if (this.steps.numTokens) this.arrived.push([performance.now(), this.steps.numTokens]);
  }

  // Tokens a second after the first ones; null before there are any.
  get speed() {
    if (this.arrived.length < 2) return null;
    const [begin, before] = this.arrived[0];
    const [end, after] = this.arrived.at(-1);
    return after > before && end - begin > 20 ? (1000 * (after - before)) / (end - begin) : null;
  }

  show(ended = false) {
    const { steps, speed } = this;
    const rate = speed === null ? "–" : speed.toFixed(1);
    $(this.speculating ? "speed" : "plain-speed").textContent = rate;
    if (this.speculating) {
      $("tau").textContent = steps.tokensPerForward?.toFixed(2) ?? "–";
      $("rate").textContent = steps.acceptanceRate === null ? "–" : `${Math.round(100 * steps.acceptanceRate)}%`;
      drawPositions($("positions"), steps.positions);
      drawLengths($("lengths"), steps);
    }
    const told = [`${steps.numTokens} tokens`, ...(speed === null ? [] : [`${rate} tokens/s`])];
    if (this.finishReason === "length") told.push("cut at the most tokens");
    if (this.finishReason === "content_filter") told.push("ended by the content filter");
    if (ended && this.finishReason === null) told.push("not complete");
    if (ended && this.finishReason === "stop" && !this.text) told.push("the model said nothing");
    if (ended || steps.numTokens) this.foot.textContent = told.join(" · ");
    follow();
  }
}

function verdict(answer, plain) {
  const same = answer.text === plain.text;
  const ratio = answer.speed && plain.speed ? `${(answer.speed / plain.speed).toFixed(2)}× the speed. ` : "";
  return element("p", `verdict ${same ? "same" : "differs"}`, `${ratio}The two texts are ${same ? "the same" : "different"}.`);
}

function askForKey() {
  $("settings").open = true;
  $("key").focus();
}

function failure(error, prompt, turn) {
  const again = element("button", "", "Try again");
  again.type = "button";
  again.addEventListener("click", () => { if (!running) { turn.remove(); send(prompt); } });
  if (error.status === 401) askForKey();
  const box = element("div", "failure", element("strong", "", error.title), element("p", "", error.message), again);
  box.setAttribute("role", "alert");
  return box;
}

async function send(prompt) {
  empty.remove();
  messages.push({ role: "user", content: prompt });
  const turn = element("section", "turn", element("article", "message user", element("h3", "", "You"), prompt));
  const both = $("beside").checked;
  const pair = element("div", both ? "pair" : "");
  turn.append(pair);
  talk.append(turn);
  talk.scrollTop = talk.scrollHeight;
  const answer = new Answer(pair, "With speculation", true);
  const plain = both ? new Answer(pair, "Without speculation", false) : null;
  $("plain-speed").textContent = "–";
  begin(new AbortController());
  const history = messages;
  try {
    // One after the other: side by side they would take each other's time.
    const seed = Math.floor(Math.random() * 2 ** 31);
    await answer.run(seed, running.signal);
    if (plain) await plain.run(seed, running.signal);
    if (plain) turn.append(verdict(answer, plain));
    $("status").textContent = `Answer complete: ${answer.steps.numTokens} tokens`;
  } catch (error) {
    if (error.name !== "AbortError") {
      if (!(error instanceof ServerError)) console.error(error);
      turn.append(failure(error, prompt, turn));
    }
    for (const begun of [answer, plain]) if (begun && !begun.steps.numTokens) begun.box.remove();
    talk.scrollTop = talk.scrollHeight;
    $("status").textContent = error.name === "AbortError" ? "Stopped" : "";
  }
  // What is there of an answer stays part of the conversation; a question without one does not.
  if (answer.text) history.push({ role: "assistant", content: answer.text });
  else history.pop();
  follow();
  end();
}

function begin(controller) {
  running = controller;
  $("stop").hidden = false;
  $("send").hidden = true;
  talk.setAttribute("aria-busy", "true");
  $("status").textContent = "Answering";
}

function end() {
  running = null;
  $("stop").hidden = true;
  $("send").hidden = false;
  talk.removeAttribute("aria-busy");
}

function submit(text) {
  const prompt = text.trim();
  if (!prompt || running) return;
  for (const name of ["gamma", "temperature", "tokens"]) {
    if (!$(name).checkValidity()) { $("settings").open = true; $(name).reportValidity(); return; }
  }
  $("prompt").value = "";
  $("settings").open = false;
  $("prompt").focus();
  send(prompt);
}

$("options").addEventListener("submit", (event) => { event.preventDefault(); $("settings").open = false; $("prompt").focus(); });
$("ask").addEventListener("submit", (event) => { event.preventDefault(); submit($("prompt").value); });
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); submit($("prompt").value); }
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (running) running.abort();
  else if ($("settings").open) { $("settings").open = false; $("settings").firstElementChild.focus(); }
});
document.addEventListener("click", (event) => {
  if (!$("settings").contains(event.target) && event.target.isConnected) $("settings").open = false;
});
for (const example of document.querySelectorAll(".example")) example.addEventListener("click", () => submit(example.textContent));
$("stop").addEventListener("click", () => { running?.abort(); $("prompt").focus(); });
$("reset").addEventListener("click", () => {
  running?.abort();
  messages = [];
  talk.replaceChildren(empty);
  for (const id of ["speed", "plain-speed", "tau", "rate"]) $(id).textContent = "–";
  drawPositions($("positions"), []);
  drawLengths($("lengths"), new Steps());
  $("prompt").focus();
});
$("key").addEventListener("change", greet);

async function greet() {
  try {
    $("model").textContent = (await modelNames($("key").value))[0] ?? "";
    $("model").classList.remove("wrong");
  } catch (error) {
    $("model").textContent = error.title ?? error.message;
    $("model").classList.add("wrong");
    if (error.status === 401) askForKey();
  }
}

if (matchMedia("(max-width: 820px)").matches) $("charts").open = false;
drawPositions($("positions"), []);
drawLengths($("lengths"), new Steps());
greet();
