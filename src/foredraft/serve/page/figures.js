// What became of the drafts of one answer, and the two charts of it.

const WIDTH = 280, LEFT = 30, TOP = 12, BOTTOM = 108;
const MOST_STEPS = 80;

// Follows an answer: a step is a run of accepted tokens and the model's own token that ends it.
export class Steps {
  constructor() {
    this.lengths = []; // tokens drafted, step by step
    this.runs = []; // {accepted, end}: `end` is r, b or t
    this.numTokens = 0;
    this.accepted = 0; // of the step that has not ended
    this.fromPrompt = 0; // 1 if the prompt itself gave the first token, which is no step
  }
  add(origin) {
    if (this.numTokens === 0 && origin === "t") this.fromPrompt = 1;
    this.numTokens += 1;
    if (origin === "a") { this.accepted += 1; return; }
    this.runs.push({ accepted: this.accepted, end: origin });
    this.accepted = 0;
  }
  // Accepted tokens of each step in `lengths`, as far as their text is here.
  get acceptedByStep() {
    const known = this.runs.slice(this.fromPrompt).map((run) => run.accepted);
    return this.lengths.map((length, step) => Math.min(length, known[step] ?? (step === known.length ? this.accepted : 0)));
  }
  get tokensPerForward() {
    return this.lengths.length ? (this.numTokens - this.fromPrompt) / this.lengths.length : null;
  }
  get acceptanceRate() {
    const drafted = sum(this.lengths);
    return drafted ? sum(this.acceptedByStep) / drafted : null;
  }
  // For each position: how many drafts were right there, and how many were checked.
  get positions() {
    const found = [];
    for (const { accepted, end } of this.runs) {
      const checked = accepted + (end === "r" ? 1 : 0);
      for (let position = 0; position < checked; position += 1) {
        found[position] ??= { right: 0, checked: 0 };
        found[position].checked += 1;
        found[position].right += position < accepted ? 1 : 0;
      }
    }
    return found;
  }
}

function sum(numbers) {
  return numbers.reduce((total, number) => total + number, 0);
}

function svg(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function gridLine(y, label) {
  return [
    svg("line", { x1: LEFT, x2: WIDTH, y1: y, y2: y, class: "grid" }),
    svg("text", { x: LEFT - 5, y: y + 3, "text-anchor": "end" }, label),
  ];
}

function bar(x, width, height, kind, title) {
  const made = svg("rect", { x, y: BOTTOM - height, width, height, class: kind });
  made.append(svg("title", {}, title));
  return made;
}

function replace(chart, label, parts) {
  chart.setAttribute("aria-label", label);
  chart.replaceChildren(...parts);
}

function empty(chart, text) {
  replace(chart, text, [svg("text", { x: WIDTH / 2, y: 66, "text-anchor": "middle" }, text)]);
}

export function drawPositions(chart, positions) {
  if (!positions.length) return empty(chart, "No drafts yet");
  const height = BOTTOM - TOP;
  const slot = (WIDTH - LEFT) / Math.max(positions.length, 5);
  const parts = [0, 0.5, 1].flatMap((share) => gridLine(BOTTOM - height * share, `${100 * share}%`));
  const told = positions.map(({ right, checked }, place) => {
    const share = right / checked;
    const middle = LEFT + (place + 0.5) * slot;
    const percent = `${Math.round(100 * share)}%`;
    const title = `position ${place + 1}: ${right} of ${checked} accepted`;
    parts.push(bar(middle - slot * 0.35, slot * 0.7, Math.max(1, height * share), "accepted", title));
    const above = share < 0.85;
    const attributes = { x: middle, y: BOTTOM - height * share + (above ? -4 : 11), "text-anchor": "middle" };
    parts.push(svg("text", { ...attributes, class: above ? "value" : "value inside" }, percent));
    parts.push(svg("text", { x: middle, y: BOTTOM + 12, "text-anchor": "middle" }, place + 1));
    return `${place + 1}: ${percent} of ${checked}`;
  });
  parts.push(svg("text", { x: (LEFT + WIDTH) / 2, y: BOTTOM + 23, "text-anchor": "middle" }, "position in the draft"));
  return replace(chart, `Accepted by position. ${told.join(", ")}`, parts);
}

export function drawLengths(chart, steps) {
  const { lengths, acceptedByStep } = steps;
  if (!lengths.length) return empty(chart, "No steps yet");
  const first = Math.max(0, lengths.length - MOST_STEPS);
  const most = Math.max(2, ...lengths);
  const unit = (BOTTOM - TOP) / most;
  const slot = (WIDTH - LEFT) / Math.max(lengths.length - first, 20);
  const marks = most > 5 ? [0, Math.round(most / 2), most] : [...Array(most + 1).keys()];
  const parts = marks.flatMap((length) => gridLine(BOTTOM - unit * length, length));
  for (let step = first; step < lengths.length; step += 1) {
    const x = LEFT + (step - first) * slot + slot * 0.1;
    const title = `step ${step + 1}: ${acceptedByStep[step]} of ${lengths[step]} accepted`;
    parts.push(bar(x, slot * 0.8, lengths[step] ? unit * lengths[step] : 1.5, "drafted", title));
    if (acceptedByStep[step]) parts.push(bar(x, slot * 0.8, unit * acceptedByStep[step], "accepted", title));
  }
  parts.push(svg("text", { x: LEFT, y: BOTTOM + 12 }, `step ${first + 1}`));
  const last = LEFT + (lengths.length - first) * slot;
  if (last > LEFT + 60) parts.push(svg("text", { x: last, y: BOTTOM + 12, "text-anchor": "end" }, lengths.length));
  const mean = (sum(lengths) / lengths.length).toFixed(1);
  parts.push(svg("text", { x: WIDTH, y: BOTTOM + 23, "text-anchor": "end" }, `mean γ ${mean}`));
  return replace(chart, `Chosen γ in ${lengths.length} steps: mean ${mean}, largest ${Math.max(...lengths)}`, parts);
}
