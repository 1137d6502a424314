// What both pages of `headway web` share: elements, numbers, and the stream of states.
"use strict";

// Texts of a cluster become text nodes alone, so no name in one is ever markup.
function el(tag, props, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props || {})) {
    if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== ""));
  return node;
}

// Replaces what an element shows; whoever had the focus in it keeps it.
function show(id, ...children) {
  const focused = document.activeElement && document.activeElement.id;
  document.getElementById(id).replaceChildren(...children.flat());
  if (focused && document.activeElement.id !== focused) document.getElementById(focused)?.focus({ preventScroll: true });
}

// A sentence whose commands stand in backquotes.
function sentence(text) {
  return text.split("`").map((part, index) => (index % 2 ? el("code", {}, part) : part));
}

// Each column: [title, cell of a row, class]. Columns in which no row has anything are left out.
function table(columns, rows) {
  const isEmpty = (cell) => cell === null || cell === undefined || cell === "" || (Array.isArray(cell) && !cell.length);
  const cells = columns.map(([, cell]) => rows.map((row) => cell(row)));
  const kept = columns.flatMap((_, index) => (cells[index].every(isEmpty) ? [] : [index]));
  const head = kept.map((index) => el("th", { class: columns[index][2] }, columns[index][0]));
  const body = rows.map((_, row) => el("tr", {}, kept.map((index) => {
    const [[title, , kind], cell] = [columns[index], cells[index][row]];
    return isEmpty(cell) ? el("td", { class: kind }) : el("td", { class: kind, "data-title": title }, cell);
  })));
  return el("table", {}, el("thead", {}, el("tr", {}, head)), el("tbody", {}, body));
}

function bytes(number, unit = "B") {
  let power = 0;
  while (number >= 999.5 && power < 4) [number, power] = [number / 1000, power + 1];
  return `${number >= 99.5 || !power ? number.toFixed(0) : number.toPrecision(2)} ${["", "k", "M", "G", "T"][power]}${unit}`;
}

const seconds = (number) => (number < 0.1 ? `${(1e3 * number).toPrecision(2)} ms` : `${number.toPrecision(2)} s`);
const whole = (number) => Math.round(number).toLocaleString("en");

function health(kind, ...content) {
  document.getElementById("health").className = kind;
  show("health", ...content);
}

// Listens to events by name. Dials again after any end; onBack is told each time that the server is there again.
function listen(url, parts, onBack) {
  const source = new EventSource(url);
  source.onopen = onBack;
  for (const [name, take] of Object.entries(parts)) {
    source.addEventListener(name, (event) => take(JSON.parse(event.data)));
  }
  source.onerror = () => {
    const advice = source.readyState === EventSource.CLOSED
      ? "it refuses this page: open the address that it printed"
      : "is it still running? This page dials again by itself; what is below is old";
    health("bad", ...sentence(`✗ no answer from \`headway web\`: ${advice}`));
    if (source.readyState === EventSource.CLOSED) setTimeout(() => listen(url, parts, onBack), 5000);
  };
}
