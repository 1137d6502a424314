// The page of a job: the panels of its report, kept up while it trains.
"use strict";

const job = decodeURIComponent(location.pathname.split("/")[2]);
const safety = el("section", {}, el("h2", {}, "If a machine is lost now"), el("div", { id: "safety" }));
const ways = el("section", { class: "whole" }, el("h2", {}, "Links"), el("div", { id: "links" }));
document.title = `${job} · headway`;

listen(`/jobs/${encodeURIComponent(job)}/events`, {
  picture(picture) {
    if (Headway.page) Headway.page.replace(picture);
    else Headway.page = Headway.open(document.getElementById("page"), picture);
    Headway.page.below.append(safety, ways);
  },
  rows: (rows) => Headway.page?.append(rows),
  report(report) {
    document.title = `${report.batch === null ? 0 : report.batch + 1}/${report.batches} ${job} · headway`;
  },
  now(state) {
    const [first] = state.troubles.map(trouble);
    if (first) health("bad", "✗ ", ...first);
    else health("good", state.cost ? `✓ training; ${state.cost}` : `✓ ${state.phase}`);
    safety.lastElementChild.replaceChildren(...state.safety.map((line) => el("p", {}, ...sentence(line))));
  },
  links: (rows) => ways.lastElementChild.replaceChildren(...linksOf(rows)),
});
