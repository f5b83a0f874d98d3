// Bars of hops: how a request's or a step's time is divided.

const HOPS = ["encode", "route", "queue", "prefill", "links", "return", "decode", "write"];
const STEP_HOPS = ["schedule", "send", "launch", "device", "return"];
for (const name of [...HOPS, "first token"]) {
  byId("hop-legend").append(el("li", { class: hopClass(name) }, name === "first token" ? "until the first token" : name));
}

function hopClass(name) {
  return HOPS.includes(name) || STEP_HOPS.includes(name) ? `hop-${name}` : "hop-wait";
}

/** A bar of parts as long as the hops took; gives what it says, and "" where it says that already. */
function showHops(bar, by) {
  const hops = Object.entries(by);
  const sum = hops.reduce((all, [, seconds]) => all + seconds, 0);
  const text = hops.map(([name, seconds]) => `${name} ${duration(seconds)}`).join(", ");
  if (bar.said === text) return "";
  bar.said = text;
  set(bar, { "aria-label": text || "nothing", title: text });
  while (bar.children.length > hops.length) bar.lastChild.remove();
  while (bar.children.length < hops.length) bar.append(el("span"));
  hops.forEach(([name, seconds], place) => {
    const part = bar.children[place];
    part.className = hopClass(name);
    part.style.width = `${(100 * seconds) / Math.max(sum, 1e-9)}%`;
  });
  return text;
}
