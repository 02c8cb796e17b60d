"use strict";

const at = (id) => document.getElementById(id);
const EVERY = "every";
const FADED = 0.18; // opacity of a token that no selected head holds

// The text so far: its tokens, how many of them are the prompt's, and what the cache holds.
let pieces = [], spans = [], prompted = 0, view = null, running = null;

function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB"];
  let unit = 0;
  for (; count >= 1024 && unit < units.length - 1; unit += 1) count /= 1024;
  return `${count.toFixed(unit ? 1 : 0)} ${units[unit]}`;
}

function fill(select, count) {
  const names = [EVERY, ...Array(count).keys()];
  if (select.options.length === names.length) return;
  select.replaceChildren(...names.map((name) => new Option(name, name)));
}

// The lists of live positions that the selectors choose.
function chosen() {
  const layer = at("layer").value, head = at("head").value;
  const layers = layer === EVERY ? view.positions : [view.positions[Number(layer)]];
  return layers.flatMap((heads) => (head === EVERY ? heads : [heads[Number(head)]]));
}

function appendTokens(added) {
  if (!pieces.length) prompted = Math.max(0, added.length - 1);
  for (const piece of added) {
    const span = document.createElement("span");
    span.textContent = piece;
    if (pieces.length >= prompted) span.className = "made";
    pieces.push(piece);
    spans.push(span);
    at("text").append(span);
  }
}

function showNumbers() {
  const dense = view.live_bytes * view.cr_factor;
  at("seen").textContent = view.tokens;
  at("factor").textContent = view.cr_factor.toFixed(2);
  at("live").textContent = bytes(view.live_bytes);
  at("dense").textContent = bytes(dense);
  at("bar").style.width = `${100 * view.live_bytes / dense}%`;
  at("densebar").style.width = "100%";
}

function show() {
  if (!view) return;
  showNumbers();
  if (!view.positions) {
    at("status").textContent = "The cache of this server does not keep positions.";
    return;
  }
  fill(at("layer"), view.positions.length);
  fill(at("head"), view.positions[0].length);
  const lists = chosen(), counts = new Array(pieces.length).fill(0);
  for (const list of lists) for (const position of list) counts[position] += 1;
  const held = lists.reduce((sum, list) => sum + list.length, 0) / lists.length;
  at("held").textContent = Number.isInteger(held) ? held : held.toFixed(1);
  spans.forEach((span, position) => {
    const share = position < view.tokens ? counts[position] / lists.length : 1;
    span.style.opacity = FADED + (1 - FADED) * share;
    span.classList.toggle("gone", share === 0);
  });
}

function take(event) {
  if (event.error) throw new Error(event.error.message);
  for (const choice of event.choices) {
    if (!choice.kv) continue;
    appendTokens(choice.kv.pieces);
    view = choice.kv;
  }
}

async function read(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.slice("data: ".length);
      if (data !== "[DONE]") take(JSON.parse(data));
    }
    show();
  }
}

function request() {
  const route = at("route").value, text = at("prompt").value;
  const input = route.includes("chat") ? { messages: [{ role: "user", content: text }] } : { prompt: text };
  const body = {
    ...input,
    max_tokens: Number(at("tokens").value),
    temperature: Number(at("temperature").value),
    ignore_eos: at("ignore").checked,
    stream: true,
    kv_positions: true,
  };
  return fetch(route.slice(1), {
    method: "POST",
    headers: headers(),
    body: JSON.stringify(body),
    signal: running.signal,
  });
}

function headers() {
  const key = at("key").value;
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function run() {
  running = new AbortController();
  pieces = [], spans = [], prompted = 0, view = null;
  at("text").replaceChildren();
  setStatus("running");
  at("run").disabled = true;
  at("stop").disabled = false;
  try {
    const response = await request();
    if (!response.ok) throw new Error((await response.json()).error.message);
    await read(response);
    setStatus(at("status").textContent === "running" ? "done" : at("status").textContent);
  } catch (error) {
    setStatus(error.name === "AbortError" ? "stopped" : error.message, error.name !== "AbortError");
  }
  at("run").disabled = false;
  at("stop").disabled = true;
}

function setStatus(text, isError = false) {
  at("status").textContent = text;
  at("status").classList.toggle("error", isError);
}

async function nameModel() {
  const response = await fetch("v1/models", { headers: headers() });
  if (response.ok) at("model").textContent = (await response.json()).data[0].id;
}

at("form").addEventListener("submit", (event) => { event.preventDefault(); run(); });
at("stop").addEventListener("click", () => running.abort());
at("layer").addEventListener("change", show);
at("head").addEventListener("change", show);
at("key").addEventListener("change", nameModel);
nameModel();
