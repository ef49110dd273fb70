// Starts the page: follows the run, and shows the view that the address names.

import { wantedOf } from "./links.js";
import { follow, get } from "./api.js";
import { ArchiveView } from "./archive.js";
import { allowChanges } from "./changes.js";
import { CompareView } from "./compare.js";
import { byId, coded, h, setText, svg } from "./dom.js";
import { GroupView } from "./group.js";
import { RolloutsView } from "./rollouts.js";
import { RunView } from "./run.js";

const ICONS = {
  starting: "M8 2a6 6 0 1 0 6 6",
  training: "M4 2l10 6-10 6z",
  starving: "M4 2h8M4 14h8M4 2c0 4 8 8 8 12M12 2c0 4-8 8-8 12",
  paused: "M5 3v10M11 3v10",
  failing: "M3 3l10 10M13 3L3 13",
  "memory full": "M3 13V5h10v8zM3 8h10M3 11h10",
  "trainer gone": "M8 2l7 12H1zM8 6v4M8 12v.5",
  stopped: "M4 4h8v8H4z",
  finished: "M2 9l4 4 8-10",
  archive: "M2 3h12v3H2zM3 6v7h10V6M6 9h4",
  lost: "M2 8c3-5 9-5 12 0M5 11c2-3 4-3 6 0M2 2l12 12",
};

async function start() {
  let about = null;
  while (!about) {
    about = await get("api/about").catch((error) => setText(byId("sentence"), error.message));
    if (!about) await new Promise((wake) => setTimeout(wake, 2000));
  }
  allowChanges(about.may_change);
  setText(byId("run-name"), about.run);
  const views = {
    run: about.archive ? new ArchiveView(byId("view-run"), about.archive) : new RunView(byId("view-run")),
    rollouts: new RolloutsView(byId("view-rollouts"), about),
  };
  views.group = new GroupView(byId("view-group"), views.rollouts);
  views.compare = new CompareView(byId("view-compare"));
  let heardMs = 0,
    lost = "";

  const route = () => {
    const [path, query] = location.hash.slice(2).split("?"),
      [first, ...names] = path.split("/").map(decoded);
    const list = names.length > 1 ? "group" : "rollouts",
      compare = names.length === 4 ? "compare" : "rollouts",
      shown = { rollouts: list, compare }[first] ?? "run";
    for (const name of Object.keys(views)) byId(`view-${name}`).hidden = name !== shown;
    for (const link of document.querySelectorAll("nav a"))
      link.ariaCurrent = link.dataset.view === (shown === "run" ? "run" : "rollouts") ? "page" : null;
    byId("diagnosis").classList.toggle("brief", shown !== "run");
    if (shown === "run") views.run.open(query ?? "");
    if (shown === "group") views.group.show(...names.slice(0, 2), wantedOf(query));
    if (shown === "compare") views.compare.show(...names);
    if (shown === "rollouts") views.rollouts.show(wantedOf(query));
  };
  window.addEventListener("hashchange", route);
  route();

  document.addEventListener("keydown", onKey);
  if (about.archive) {
    const sentence = `what ${about.run} has trained or dropped, in ${about.archive.url}`;
    diagnose({ state: "archive", sentence, remedies: [] }, about.run);
    views.rollouts.tasks(about.archive.tasks.map((task) => ({ task })));
    return;
  }
  follow(
    (status) => {
      [heardMs, lost] = [Date.now(), ""];
      diagnose(status.diagnosis, about.run);
      views.run.show(status);
      views.rollouts.tasks(status.tasks);
    },
    (why) => {
      lost = why;
      const sentence = heardMs ? `connection lost: what is shown is old; ${why}` : why;
      diagnose({ state: "lost", sentence, remedies: [] }, about.run);
    },
  );
  setInterval(() => {
    const age = Math.round((Date.now() - heardMs) / 1000);
    setText(byId("age"), heardMs ? `page refreshed ${age} s ago` : "");
    byId("age").classList.toggle("old", age >= 3 || lost !== "");
  }, 500);
}

/** A decoded part of an address; a part with an invalid encoding stays unchanged. */
function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

function onKey(event) {
  const isTyping = event.target.matches?.("input, textarea, select");
  if (event.key === "/" && !isTyping && !byId("dialog").open) {
    event.preventDefault();
    if (byId("view-rollouts").hidden) location.hash = document.querySelector("nav a[data-view=rollouts]").hash;
    setTimeout(() => byId("search").focus());
  }
  if (event.key === "Escape" && !byId("dialog").open) {
    if (isTyping) event.target.blur();
    else if (byId("view-run").hidden && byId("view-rollouts").hidden) history.back();
  }
}

function diagnose({ state, sentence, remedies, level = remedies.length ? "attention" : "good" }, run) {
  const box = byId("diagnosis");
  box.dataset.level = level;
  if (box.dataset.state !== state) {
    box.dataset.state = state;
    byId("state-icon").replaceChildren(
      svg("svg", { viewBox: "0 0 16 16" }, svg("path", { d: ICONS[state] ?? ICONS.starting })),
    );
  }
  setText(byId("state"), `${state}:`);
  const text = [sentence, ...remedies].join("\n");
  if (box.dataset.text !== text) {
    box.dataset.text = text;
    byId("sentence").replaceChildren(...coded(sentence));
    byId("to-do").replaceChildren(...toDo(remedies));
  }
  const title = `${state} \u00b7 ${run} \u00b7 rollq`;
  if (document.title !== title) document.title = title;
}

/** The remedies: a line, or a list if there are several. */
function toDo(remedies) {
  if (!remedies.length) return [];
  if (remedies.length === 1) return [h("p", null, "to do: ", coded(remedies[0]))];
  return [
    h("p", null, "to do:"),
    h(
      "ol",
      null,
      remedies.map((remedy) => h("li", null, coded(remedy))),
    ),
  ];
}

start();
