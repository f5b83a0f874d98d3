// A chat with the model.

const UNSET = "model's default";
const SLIDERS = [
  ["temperature", "Temperature", 0, 2, 0.05, 0.7],
  ["top_p", "Top p", 0.05, 1, 0.05, 1],
  ["top_k", "Top k (0: all)", 0, 200, 1, 0],
  ["min_p", "Min p", 0, 1, 0.01, 0],
  ["presence_penalty", "Presence penalty", -2, 2, 0.1, 0],
  ["frequency_penalty", "Frequency penalty", -2, 2, 0.1, 0],
  ["max_tokens", "Most tokens", 1, 4096, 1, 256],
];
/** A slider says nothing until it is moved: what it would say is the model's to know (generation_config.json). */
const sampling = new Map();
for (const [name, title, least, most, step, value] of SLIDERS) {
  const slider = el("input", { type: "range", id: `slider-${name}`, min: least, max: most, step, value });
  const shown = el("output", { for: `slider-${name}` }, UNSET);
  const setting = {
    moved: false,
    value: () => (setting.moved || slider.value !== slider.defaultValue ? Number(slider.value) : undefined),
    reset() {
      setting.moved = false;
      slider.value = slider.defaultValue;
      say(shown, UNSET);
    },
  };
  slider.addEventListener("input", () => {
    setting.moved = true;
    say(shown, slider.value);
  });
  sampling.set(name, setting);
  byId("sampling").append(el("label", { for: slider.id }, `${title} `, shown, slider));
}
byId("unset").addEventListener("click", () => sampling.forEach((setting) => setting.reset()));

/** One conversation: an answer that is still on its way belongs to the one that it was asked in. */
const fresh = () => ({ messages: [], controller: null });
let talk = fresh();

function turn(role) {
  const node = el("article", { class: `turn ${role}` }, el("h3", {}, role));
  byId("talk").append(node);
  return node;
}

function body() {
  const system = byId("system").value.trim();
  const tools = byId("tools").value.trim();
  const asked = {
    model: feed.latest?.model,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...talk.messages],
    stream: true,
    stream_options: { include_usage: true },
  };
  sampling.forEach((setting, name) => (asked[name] = setting.value())); // what is undefined is left out
  if (tools) asked.tools = JSON.parse(tools);
  return JSON.stringify(asked);
}

/** One answer as it comes: reasoning, text and calls, each in a place of its own. */
function answerView(node) {
  const part = {};
  const place = (name, tag) => {
    if (!part[name]) {
      part[name] = el(tag, { class: name });
      node.append(part[name]);
    }
    return part[name];
  };
  const calls = [];
  return {
    calls,
    text: "",
    take(delta) {
      const reasoning = delta.reasoning ?? delta.reasoning_content;
      if (reasoning) place("reasoning", "pre").append(reasoning);
      if (delta.content) {
        this.text += delta.content;
        place("content", "pre").append(delta.content);
      }
      for (const call of delta.tool_calls ?? []) {
        const known = (calls[call.index] ??= { id: call.id, type: "function", function: { name: "", arguments: "" }, node: null });
        known.function.name += call.function?.name ?? "";
        known.function.arguments += call.function?.arguments ?? "";
        if (!known.node) node.append((known.node = el("pre", { class: "call" })));
        say(known.node, `${known.function.name}(${known.function.arguments})`);
      }
    },
    fail(text) {
      node.append(el("p", { class: "failure" }, text));
    },
  };
}

function showAnswering(isAnswering) {
  byId("send").disabled = isAnswering;
  byId("stop").disabled = !isAnswering;
}

async function converse(text) {
  const mine = talk;
  const tell = (news) => mine === talk && say(byId("said"), news);
  turn("user").append(el("pre", {}, text));
  mine.messages.push({ role: "user", content: text });
  const view = answerView(turn("assistant"));
  const begun = performance.now();
  let first = 0;
  let usage = null;
  mine.controller = new AbortController();
  showAnswering(true);
  tell("waiting");
  try {
    const answer = await fetch("v1/chat/completions", {
      method: "POST", headers: { "Content-Type": "application/json", ...headers() }, body: body(), signal: mine.controller.signal,
    });
    if (!answer.ok) throw new Error(await failure(answer));
    await readEvents(answer, (data) => {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      usage = chunk.usage ?? usage;
      const delta = chunk.choices[0]?.delta;
      if (!delta || mine !== talk) return;
      if (!first && (delta.content || delta.reasoning || delta.tool_calls)) {
        first = performance.now();
        tell(`answering; first token after ${duration((first - begun) / 1000)}`);
      }
      view.take(delta);
      byId("talk").scrollTop = byId("talk").scrollHeight;
    });
    const seconds = (performance.now() - first) / 1000;
    const rate = usage && usage.completion_tokens > 1 ? `, ${number((usage.completion_tokens - 1) / seconds)} tokens/s` : "";
    tell(first ? `first token after ${duration((first - begun) / 1000)}${usage ? `, ${usage.completion_tokens} tokens` : ""}${rate}` : "nothing was said");
  } catch (error) {
    const stopped = error.name === "AbortError";
    if (!stopped) view.fail(error.message);
    tell(stopped ? "stopped" : "failed");
  } finally {
    const calls = view.calls.filter(Boolean).map(({ id, type, function: called }) => ({ id, type, function: called }));
    if (view.text || calls.length) mine.messages.push({ role: "assistant", content: view.text || null, ...(calls.length ? { tool_calls: calls } : {}) });
    else mine.messages.pop();
    if (mine === talk) showAnswering(false);
  }
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = byId("message").value.trim();
  if (!text || byId("send").disabled) return;
  byId("message").value = "";
  converse(text);
});
byId("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("ask").requestSubmit();
  }
});
byId("stop").addEventListener("click", () => talk.controller?.abort());
byId("clear").addEventListener("click", () => {
  const before = talk;
  talk = fresh();
  before.controller?.abort();
  byId("talk").replaceChildren();
  say(byId("said"), "");
  showAnswering(false);
});
