// Pause, resume and drain: the dialog says what will change, and asks.

import { post } from "./api.js";
import { byId, h, setText } from "./dom.js";

const KEPT = "rollq-token";
const VERBS = { pause: "Pause", run: "Resume", drain: "Drain" };
let mayChange = false;

export function allowChanges(may) {
  mayChange = may;
}

/** Buttons for one run, task or worker; nothing where the dashboard only reads. */
export function buttons(kind, name = "") {
  if (!mayChange) return h("span");
  const about = kind === "run" ? "all tasks" : `${kind} ${name}`;
  return h(
    "span",
    { class: "orders" },
    Object.entries(VERBS).map(([order, verb]) =>
      h(
        "button",
        { type: "button", "aria-label": `${verb} ${about}`, onclick: () => ask({ order, kind, name }) },
        verb,
      ),
    ),
  );
}

export function columns(kind, nameOf) {
  return mayChange ? [{ title: "", cell: (row) => buttons(kind, nameOf(row)) }] : [];
}

async function ask(change) {
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
    setText(yes, VERBS[change.order]);
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
    } catch (error) {
      fail(error);
    }
  };
  field.value = "";
  setText(byId("dialog-error"), "");
  show(`${VERBS[change.order]} ${change.name || "all tasks"}`, "The token shows what will change, before it does.");
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
