// The cluster's page: each part of the state is drawn when it comes.
"use strict";

const MOST_OPEN = 24; // of a larger cluster, a site is open only if somebody opens it
const opened = new Map(); // what somebody opened or closed, by site
let nodes = [];

function about(state) {
  document.getElementById("where").textContent = `${state.etcd}${state.leader ? ` · ${state.leader} leads` : ""}`;
  const [first, ...others] = state.troubles.map(trouble);
  if (first) health("bad", "✗ ", ...first);
  else health("good", "✓ all well");
  const more = document.getElementById("troubles");
  more.hidden = !others.length;
  more.firstElementChild.textContent = `${state.num_troubles - 1} more`;
  more.lastElementChild.replaceChildren(...others.map((each) => el("li", {}, each)));
}

const ORDER = ["queued", "paused", "failed", "cancelled", "finished"];

function jobs(rows) {
  const rank = (job) => [ORDER.indexOf(job.phase), job.queue_position || 0];
  rows.sort((a, b) => rank(a)[0] - rank(b)[0] || rank(a)[1] - rank(b)[1]);
  show("jobs", rows.length ? table([
    ["job", (job) => el("a", { id: `job-${job.name}`, href: `/jobs/${encodeURIComponent(job.name)}` }, job.name)],
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
    ["state", (member) => member.trouble ? el("span", { class: "trouble" }, member.trouble) : member.status.is_leader ? "leads" : "follows"],
    ["release", (member) => member.status?.version],
    ["database", (member) => (member.status ? bytes(member.status.database_bytes) : ""), "number"],
  ], rows));
}

const filter = document.getElementById("filter");
filter.addEventListener("input", drawNodes);
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && event.target === document.body) { event.preventDefault(); filter.focus(); }
  if (event.key === "Escape" && event.target === filter) { filter.value = ""; drawNodes(); filter.blur(); }
});
const links = (rows) => show("links", ...linksOf(rows));
listen("/events", { about, jobs, nodes: (rows) => { nodes = rows; drawNodes(); }, links, users, members });
