// The cluster's page: each part of the state is drawn when it comes.
"use strict";

const MOST_OPEN = 24; // of a larger cluster, a site is open only if somebody opens it
const opened = new Map(); // what somebody opened or closed, by site
let nodes = [];

function about(state) {
  document.getElementById("where").textContent = `${state.etcd}${state.leader ? ` · ${state.leader} leads` : ""}`;
  const [first, ...others] = state.troubles;
  if (!first) health("good", "✓ all well");
  else health("bad", `✗ ${first.about}: `, ...sentence(first.sentence), first.advice ? " — " : "", ...sentence(first.advice));
  const more = document.getElementById("troubles");
  more.hidden = !others.length;
  more.firstElementChild.textContent = `${state.num_troubles - 1} more`;
  more.lastElementChild.replaceChildren(
    ...others.map((each) => el("li", {}, `${each.about}: `, sentence(each.sentence), each.advice ? " — " : "", sentence(each.advice))),
  );
}

const ORDER = ["queued", "paused", "failed", "cancelled", "finished"];

function jobs(rows) {
  const rank = (job) => [ORDER.indexOf(job.phase), job.queue_position || 0];
  rows.sort((a, b) => rank(a)[0] - rank(b)[0] || rank(a)[1] - rank(b)[1]);
  show("jobs", rows.length ? table([
    ["job", (job) => job.name],
    ["phase", (job) => el("span", { class: `phase ${job.phase}` }, job.phase)],
    ["progress", (job) => [el("progress", { value: (job.batch ?? -1) + 1, max: job.batches }), ` ${job.progress}`]],
    ["loss", (job) => job.loss?.toFixed(4), "number"],
    ["tokens/s", (job) => job.tokens_per_second && whole(job.tokens_per_second), "number"],
    ["time", (job) => job.left, "number"],
    ["user", (job) => job.user + (job.priority ? ` · priority ${job.priority}` : "")],
    ["why", (job) => job.why, "wide"],
  ], rows) : el("p", {}, sentence("no jobs; `headway submit JOB.toml` makes one")));
}

const ofNode = [
  ["node", (node) => node.name],
  ["state", (node) => el("span", { class: node.is_up ? "phase" : "phase failed" }, node.is_up ? node.notes || "up" : node.notes)],
  ["devices", (node) => node.devices],
  ["memory", (node) => (node.device_bytes ? `${bytes(node.planned_bytes)} of ${bytes(node.device_bytes)} planned` : ""), "number"],
  ["holds", (node) => node.holds.map((text) => el("div", {}, text)), "wide"],
  ["trouble", (node) => node.troubles.map((text) => el("div", { class: "trouble" }, sentence(text))), "wide"],
];

function drawNodes() {
  const wanted = document.getElementById("filter").value.toLowerCase();
  const found = wanted ? nodes.filter((node) => JSON.stringify(node).toLowerCase().includes(wanted)) : nodes;
  const sites = Map.groupBy ? Map.groupBy(found, (node) => node.site) : grouped(found);
  show("nodes", [...sites].sort().map(([site, those]) => {
    const ill = those.filter((node) => node.troubles.length).length;
    const up = those.filter((node) => node.is_up).length;
    const box = el("details", { open: opened.get(site) ?? (found.length <= MOST_OPEN || Boolean(wanted)) },
      el("summary", { id: `site-${site}` }, el("b", {}, site || "gone"), ` ${up} of ${those.length} up`,
        ill ? el("span", { class: "trouble" }, ` · ${ill} with trouble`) : ""));
    const fill = () => box.open && box.children.length < 2 && box.append(table(ofNode, those));
    box.addEventListener("toggle", () => { if (!wanted) opened.set(site, box.open); fill(); });
    fill();
    return box;
  }), found.length ? [] : [el("p", {}, wanted ? "no node fits the filter" : sentence("no node is up; start one with `headway daemon`"))]);
}

function grouped(rows) {
  const sites = new Map();
  for (const node of rows) sites.set(node.site, [...(sites.get(node.site) || []), node]);
  return sites;
}

// Ends on a circle; a line is as thick as its way is fast, dashed where no plan uses it, and crossed out where blocked.
function map(rows, names) {
  const [wide, high, radius] = [640, 420, 150];
  const at = new Map(names.map((name, index) => {
    const angle = (2 * Math.PI * index) / names.length - Math.PI / 2;
    return [name, [wide / 2 + 1.3 * radius * Math.cos(angle), high / 2 + radius * Math.sin(angle)]];
  }));
  const svg = (tag, props, ...children) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(props)) node.setAttribute(name, value);
    node.append(...children);
    return node;
  };
  const lines = rows.filter((row) => row.ends[0] !== row.ends[1]).map((row) => {
    const [[x1, y1], [x2, y2]] = row.ends.map((end) => at.get(end));
    const width = row.num_measured ? Math.max(1, Math.min(9, Math.log10(Math.max(...row.bytes_per_s, 1)) - 4)) : 1;
    const kind = row.blocked.length ? "blocked" : row.jobs.length ? "used" : "idle";
    return svg("line", { x1, y1, x2, y2, "stroke-width": width, class: kind }, svg("title", {}, document.createTextNode(rate(row))));
  });
  const dots = names.map((name) => {
    const [x, y] = at.get(name);
    const anchor = Math.abs(x - wide / 2) < 20 ? "middle" : x < wide / 2 ? "end" : "start";
    const shift = { middle: 0, end: -12, start: 12 }[anchor];
    const label = svg("text", { x: x + shift, y: anchor === "middle" ? (y < high / 2 ? y - 14 : y + 22) : y + 5, "text-anchor": anchor });
    label.textContent = name.length > 22 ? `${name.slice(0, 21)}…` : name;
    return svg("g", {}, svg("circle", { cx: x, cy: y, r: 7 }), label);
  });
  return svg("svg", { viewBox: `0 0 ${wide} ${high}`, role: "img", "aria-label": "map of links" }, ...lines, ...dots);
}

function rate(row) {
  if (!row.num_measured) return "not measured";
  const [there, back] = row.bytes_per_s.map((number) => (number ? bytes(number, "B/s") : "?"));
  return `${there === back ? there : `${there} →, ${back} ←`}, ${seconds(row.round_trip_s)}`;
}

function links(rows) {
  const names = [...new Set(rows.flatMap((row) => row.ends))].sort();
  show("links", rows.length ? [names.length > 1 && names.length <= 40 ? map(rows, names) : "", table([
    ["between", (row) => row.ends[0] === row.ends[1] ? `inside ${row.ends[0]}` : row.ends.join(" — ")],
    ["rate", rate],
    ["lost", (row) => (row.loss ? `${(100 * row.loss).toPrecision(2)} %` : ""), "number"],
    ["jobs", (row) => row.jobs.join(", ")],
    ["through", (row) => row.via],
    ["trouble", (row) => row.blocked.map((text) => el("div", { class: "trouble" }, text)), "wide"],
  ], rows)] : el("p", {}, "no way between nodes is measured yet"));
}

function users(rows) {
  show("users", rows.length ? table([
    ["user", (user) => user.user || "(nobody)"],
    ["weight", (user) => user.weight, "number"],
    ["share", (user) => (user.share ? `${Math.round(100 * user.share)} %` : ""), "number"],
    ["recent device-hours", (user) => (user.used / 3600).toFixed(2), "number"],
    ["devices", (user) => user.num_devices, "number"],
    ["jobs", (user) => user.num_jobs, "number"],
  ], rows) : el("p", {}, sentence("every weight is 1 until `headway shares set` changes it")));
}

function members(rows) {
  show("members", table([
    ["member", (member) => member.address],
    ["state", (member) => member.trouble ? el("span", { class: "trouble" }, member.trouble) : member.is_leader ? "leads" : "follows"],
    ["release", (member) => member.version],
    ["database", (member) => (member.version ? bytes(member.database_bytes) : ""), "number"],
  ], rows));
}

const filter = document.getElementById("filter");
filter.addEventListener("input", drawNodes);
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && event.target === document.body) { event.preventDefault(); filter.focus(); }
  if (event.key === "Escape" && event.target === filter) { filter.value = ""; drawNodes(); filter.blur(); }
});
listen("/events", { about, jobs, nodes: (rows) => { nodes = rows; drawNodes(); }, links, users, members }, () => {});
