// Changes of the run, of tasks, workers and groups: the dialog says what will change, and asks.

import { post } from "./api.js";
import { byId, h, setText } from "./dom.js";

const KEPT = "rollq-token";
const VERBS = { pause: "Pause", run: "Resume", drain: "Drain" };
const GROUP_VERBS = { requeue: "Requeue", quarantine: "Quarantine", drop: "Drop" };
let mayChange = false;

export function allowChanges(may) {
  mayChange = may;
}

/** Buttons for one run, task or worker; nothing if the dashboard only reads. */
export function buttons(kind, name = "") {
  return orders(VERBS, { kind, name }, kind === "run" ? "all tasks" : `${kind} ${name}`);
}

/** Buttons for one group, none once a trainer has taken it; `onDone(order)` is called after a change. */
export function groupButtons({ task, group_id, status }, onDone) {
  if (["claimed", "archived", "leaving"].includes(status)) return h("span");
  return orders(GROUP_VERBS, { kind: "group", name: `${task}/${group_id}` }, `group ${task} ${group_id}`, onDone);
}

function orders(verbs, what, about, onDone) {
  if (!mayChange) return h("span");
  const button = ([order, verb]) =>
    h(
      "button",
      {
        type: "button",
        "aria-label": `${verb} ${about}`,
        onclick: () => ask({ order, ...what }, { verb, about, onDone }),
      },
      verb,
    );
  return h("span", { class: "orders" }, Object.entries(verbs).map(button));
}

export function columns(kind, nameOf) {
  return mayChange ? [{ title: "", cell: (row) => buttons(kind, nameOf(row)) }] : [];
}

async function ask(change, { verb, about, onDone }) {
  const dialog = byId("dialog"),
    yes = byId("dialog-yes"),
    field = byId("dialog-token"),
    no = byId("dialog-no");
  const show = (title, text) => {
    setText(byId("dialog-title"), title);
    setText(byId("dialog-text"), text);
  };
  const fail = (error) => {
    if (error.status === 403) sessionStorage.removeItem(KEPT);
    byId("dialog-token-label").hidden = Boolean(sessionStorage.getItem(KEPT));
    setText(byId("dialog-error"), error.message);
  };
  let previewed = false;
  const send = (dry_run) =>
    post("api/changes", { ...change, dry_run }, field.value || sessionStorage.getItem(KEPT) || "");
  const preview = async () => {
    const found = await send(true);
    if (field.value) sessionStorage.setItem(KEPT, field.value);
    byId("dialog-token-label").hidden = true;
    setText(byId("dialog-error"), "");
    show(found.title, found.text);
    setText(yes, verb);
    yes.hidden = !found.is_possible;
    previewed = true;
    (found.is_possible ? yes : no).focus();
  };
  const submit = async (event) => {
    event.preventDefault();
    try {
      if (!previewed) {
        await preview();
        return;
      }
      const found = await send(false);
      setText(byId("said"), found.done.join("; ") || "nothing has changed");
      dialog.close();
      onDone?.(change.order);
    } catch (error) {
      fail(error);
    }
  };
  field.value = "";
  setText(byId("dialog-error"), "");
  show(`${verb} ${about}`, "With the token, the page first shows what will change.");
  setText(yes, "Continue");
  yes.hidden = false;
  byId("dialog-token-label").hidden = Boolean(sessionStorage.getItem(KEPT));
  const form = dialog.querySelector("form"),
    close = () => dialog.close();
  form.addEventListener("submit", submit);
  no.addEventListener("click", close);
  dialog.addEventListener(
    "close",
    () => {
      form.removeEventListener("submit", submit);
      no.removeEventListener("click", close);
      field.value = "";
    },
    { once: true },
  );
  dialog.showModal();
  if (sessionStorage.getItem(KEPT)) await preview().catch(fail);
  else field.focus();
}
