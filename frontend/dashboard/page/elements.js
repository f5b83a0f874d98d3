// Elements, texts and numbers. Whatever comes from the server becomes text nodes and attributes, never markup.

const byId = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes and children; strings become text. */
function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function svg(tag, attributes = {}) {
  const node = document.createElementNS(SVG, tag);
  set(node, attributes);
  return node;
}

function set(node, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
  }
}

function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

let compact = null; // made for the first large number: it takes 10 ms of a browser that has just begun
function number(value) {
  if (value < 1000) return String(Math.round(value * 10) / 10);
  compact ??= new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
  return compact.format(value);
}
const percent = (share) => `${(100 * share).toFixed(share < 0.1 && share > 0 ? 1 : 0)} %`;
const megabytes = (bytes) => (bytes ? `${Math.round(bytes / 1e6)} MB` : "-");

function duration(seconds) {
  if (seconds < 0.001) return `${Math.round(seconds * 1e6)} µs`;
  if (seconds < 1) return `${(seconds * 1e3).toFixed(seconds < 0.1 ? 1 : 0)} ms`;
  if (seconds < 120) return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
  return seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`;
}

const measured = (seconds) => (seconds ? duration(seconds) : "-"); // 0: nothing was

const clock = (wallSeconds) => new Date(wallSeconds * 1000).toLocaleTimeString();
