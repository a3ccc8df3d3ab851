// Shows what a client's folder holds and sends what its person decides. All texts are set as text, never as markup.
const find = (id) => document.getElementById(id);
const token = new URLSearchParams(location.hash.slice(1)).get("token");
const number = new Intl.NumberFormat("en");
const EVERY = 2000; // milliseconds between looks
let drawn = {}; // what each part shows, to leave what a person is using as it is

async function call(path, given) {
  const options = { headers: { authorization: `Bearer ${token}` } };
  if (given) Object.assign(options, { method: "POST", body: JSON.stringify(given) });
  if (given) options.headers["content-type"] = "application/json";
  const response = await fetch(path, options);
  const body = await response.json();
  if (!response.ok) throw new Error(body.detail);
  return body;
}

function say(sentence) {
  if (find("notice").textContent !== sentence) find("notice").textContent = sentence;
  find("notice").hidden = !sentence;
}

async function act(path, given = {}) {
  try {
    const state = await call(path, given);
    say("");
    show(state);
  } catch (error) {
    say(error.message);
    find("notice").scrollIntoView({ block: "nearest" });
  }
}

// --- making elements

function make(kind, text = "", values = {}, parts = []) {
  const made = Object.assign(document.createElement(kind), values);
  if (text !== "") made.textContent = text;
  made.append(...parts.filter(Boolean));
  return made;
}

const line = (text, kind = "") => make("p", text, { className: kind });
const list = (texts) => make("ul", "", {}, texts.map((text) => make("li", text)));

function button(text, action, main = false, disabled = false) {
  const made = make("button", text, { type: "button", className: main ? "main" : "", disabled });
  made.addEventListener("click", action);
  return made;
}

function pairs(rows) {
  return make("dl", "", {}, rows.filter((row) => row[1]).flatMap(([name, value]) => [make("dt", name), make("dd", value)]));
}

function table(heads, rows, counts = []) {
  const cell = (kind, text, place) => make(kind, text, { className: counts.includes(place) ? "n" : "" });
  const head = make("thead", "", {}, [make("tr", "", {}, heads.map((text, place) => cell("th", text, place)))]);
  const body = make("tbody", "", {}, rows.map((row) => make("tr", "", {}, row.map((text, place) => cell("td", `${text}`, place)))));
  return make("div", "", { className: "scroll", tabIndex: 0 }, [make("table", "", {}, [head, body])]);
}

function draw(id, values, parts) {
  const key = JSON.stringify(values);
  if (drawn[id] === key) return;
  const open = [...find(id).querySelectorAll("details")].map((each) => each.open);
  const place = [...find(id).querySelectorAll("button, input, textarea")].indexOf(document.activeElement);
  find(id).replaceChildren(...parts().filter(Boolean));
  [...find(id).querySelectorAll("details")].forEach((each, at) => { if (at in open) each.open = open[at]; });
  if (place >= 0) [...find(id).querySelectorAll("button, input, textarea")][place]?.focus();
  drawn[id] = key;
}

// --- the parts of the page

function show(state) {
  find("title").textContent = `${state.name}: this site's part in a federation`;
  find("lead").textContent = `Server ${state.server}; clients: ${state.names.join(", ")}. Images never leave this machine.`;
  const last = state.said.at(-1);
  find("work").textContent = state.busy ? `Now: ${state.work || "beginning"}${state.connected && last ? `; ${last}` : ""}` : "";
  if (state.failed) say(state.failed);
  const known = state.joined && !state.problem;
  for (const id of ["people", "images", "part", "limits", "record"]) find(id).hidden = !known;
  find("joining").hidden = false;
  draw("join", [state.joined, state.problem, state.key], () => showJoin(state));
  draw("participants", state.participants, () => showParticipants(state));
  draw("experiments", [state.experiments, state.busy, known], () => state.experiments.map((each) => showRequest(each, state, known)));
  draw("faults", [state.faults, state.busy, state.data], () => showFaults(state));
  draw("progress", [state.runs, state.said, state.busy, state.connected, state.experiments.map((each) => each.decision)], () => showProgress(state));
  draw("budget", state.budget, () => showBudget(state));
  draw("log", state.log, () => [table(["time (UTC)", "what", ""], state.log.map((each) => [each.time, each.kind, each.text]))]);
  if (drawn.rules !== state.policy && document.activeElement !== find("rules")) {
    find("rules").value = state.policy;
    drawn.rules = state.policy;
  }
}

function showJoin(state) {
  if (state.problem) {
    const agreed = make("input", "", { type: "checkbox", id: "moved" });
    const label = make("label", "", { className: "check" }, [agreed, make("span", "I moved or restored this folder myself.")]);
    return [line(state.problem, "refused"), label, button("Use it on this machine", () => agreed.checked && act("/join", { moved: true }))];
  }
  if (!state.joined) {
    return [
      line("This makes a key on this machine, and a request to be admitted. The key never leaves."),
      make("div", "", { className: "acts" }, [button("Make the key and the request", () => act("/join"), true)]),
    ];
  }
  return [
    line(`Send ${state.request} to the operator, if you have not yet. Compare both fingerprints by telephone:`),
    pairs([["this client's key", state.key], ["the server's authority", state.authority]]),
    showRenewal(),
  ];
}

function showRenewal() {
  const agreed = make("input", "", { type: "checkbox", id: "renewal" });
  const label = make("label", "", { className: "check" }, [agreed, make("span", "The operator admits the new request, and the other clients import and approve a new roster.")]);
  const renew = () => (agreed.checked ? act("/join", { renew: true }) : say("Say first that the others know of the new key."));
  return make("details", "", {}, [
    make("summary", "Make another key, if this one was lost or may be known to others"), label,
    make("div", "", { className: "acts" }, [button("Make another key", renew)]),
  ]);
}

function showParticipants(state) {
  const file = make("input", "", { type: "file", accept: ".json,application/json", id: "roster" });
  file.addEventListener("change", async () => file.files.length && act("/roster", { content: await file.files[0].text() }));
  const upload = [make("label", "Import the roster.json that the operator sent", { htmlFor: "roster" }), file];
  const found = state.participants;
  if (!found) return [line("No roster is known. Secure aggregation needs one; other runs do not."), ...upload];
  const members = table(["client", "fingerprint of its key"], found.members.map((each) => [each.name, each.key]));
  const facts = pairs([["fingerprint of the roster", found.fingerprint], ["authority", found.authority]]);
  if (found.pinned) return [members, facts, line("Pinned: secure aggregation is with these clients alone.", "approved"), ...upload];
  const same = make("input", "", { type: "checkbox", id: "compared" });
  const pin = button("Pin this roster", () => (same.checked ? act("/pin", { fingerprint: found.fingerprint }) : say("Compare the fingerprint first, then say so.")), true);
  return [
    members, facts, line("Not pinned yet. Compare its fingerprint with the other clients by telephone, not with the operator alone."),
    make("label", "", { className: "check" }, [same, make("span", "I compared it, and it is the same.")]),
    make("div", "", { className: "acts" }, [pin]), ...upload,
  ];
}

function showRequest(each, state, known) {
  const words = { open: "not decided", approved: "approved", refused: `refused: ${each.reason}` };
  const leaving = each.dry_run ? each.dry_run.leaves.reduce((sum, tensor) => sum + tensor.bytes, 0) : null;
  const reason = make("input", "", { type: "text", maxLength: 300, placeholder: "Reason for a refusal; the server is sent it" });
  reason.setAttribute("aria-label", `Reason for refusing ${each.name}`);
  return make("div", "", { className: "card" }, [
    make("h3", each.name),
    make("p", words[each.decision], { className: `state ${each.decision}` }),
    pairs([
      ["method", `${each.method} with ${each.model}`],
      ["rounds", number.format(each.rounds)],
      ["participants", `${each.clients} clients`],
      ["what the server sees", each.secure_sum ? "sums over clients only (secure aggregation)" : "this client's own update"],
      ["noise", each.privacy === "none" ? "none" : `epsilon ${each.epsilon}, delta ${each.delta}, hides one ${each.privacy === "record" ? "image" : "client"}`],
      ["leaves in a round", leaving === null ? "known after the dry run" : `${number.format(leaving)} bytes in ${each.dry_run.leaves.length} tensors; in ${each.rounds} round${each.rounds === 1 ? "" : "s"} about ${number.format(leaving * each.rounds)} bytes`],
      ["roster", each.roster],
      ["identity", each.identity],
    ]),
    each.problem && line(each.problem, "refused"),
    each.dry_run && showDryRun(each.dry_run),
    known && make("div", "", { className: "acts" }, [
      button(each.dry_run ? "Dry run again" : "Dry run: what would leave, and what attacks learn", () => act("/rehearse"), false, state.busy),
      button("Approve", () => act("/approve", { identity: each.identity, roster: each.roster }), true, Boolean(each.problem) || each.decision === "approved"),
    ]),
    known && make("div", "", { className: "acts" }, [reason, button("Refuse", () => (reason.value.trim() ? act("/refuse", { identity: each.identity, reason: reason.value }) : (say("Give a reason for the refusal."), reason.focus())))]),
  ]);
}

function showDryRun(found) {
  const shown = found.attacks.filter((each) => each.shown).length;
  const details = make("details", "", { open: true }, [
    make("summary", `Dry run on ${number.format(found.images)} images: ${shown} of ${found.attacks.length} attacks show a leak. Nothing was sent.`),
    table(["leaves", "kind", "shape", "bytes"], found.leaves.map((each) => [each.name, each.kind, each.shape.join(" x "), number.format(each.bytes)]), [3]),
    make("h4", "Attacks on this site's own update"),
    table(["of", "attack", "value", "in words"], found.attacks.map((each) => [each.of, each.name, each.value, each.sentence])),
    found.untried.length && make("h4", "Not tried"), found.untried.length && list(found.untried),
    make("h4", "Protection that is on"), list(found.remedies.length ? found.remedies : ["None: no secure aggregation, no noise."]),
    found.refusal && line(found.refusal, "refused"),
  ]);
  return details;
}

function showFaults(state) {
  if (!state.data) return [line("Begun without --data: a rehearsal with the experiment's own dataset.")];
  const check = button("Check the images", () => act("/check"), false, state.busy);
  const rows = (state.faults ?? []).map((each) => make("div", "", { className: "card" }, [
    make("h3", each.title), line(each.sentence), line(each.fix), each.files.length && line(each.files.join(", "), "quiet"),
  ]));
  const none = state.faults && !state.faults.length && line("No fault was found.", "approved");
  return [line(`Images: ${state.data}. What is found is shown here only.`), none, ...rows, make("div", "", { className: "acts" }, [check])];
}

function showProgress(state) {
  const approved = state.experiments.some((each) => each.decision === "approved");
  const acts = make("div", "", { className: "acts" }, [
    button("Take part", () => act("/start"), true, state.busy || !approved),
    button("Answer a survey", () => act("/survey"), false, state.busy || !approved || !state.data),
    button("Stop", () => act("/stop"), false, !state.connected),
  ]);
  const survey = state.data && line("A survey checks these images before training, and sends counts. Which files are meant is shown here only.", "quiet");
  const said = state.said.length ? make("details", "", { open: true }, [make("summary", "What happens"), list(state.said.slice(-8))]) : null;
  return [!approved && line("Approve an experiment first."), acts, survey, said, ...state.runs.map(showRun)];
}

function showRun(run) {
  const written = ({ value, low, high }, digits) => `${value.toFixed(digits)} (95 %: ${low.toFixed(digits)} to ${high.toFixed(digits)})`;
  const figures = run.figures.map(([name, estimate]) => [name, written(estimate, name.includes("%") ? 1 : 3)]);
  if (run.zero_shot !== null) figures.push(["pretrained model (zero-shot), %", run.zero_shot.toFixed(1)]);
  const rows = run.told.map((each) => [each.round, number.format(each.bytes_up), number.format(each.bytes_down), each.seconds.toFixed(1), each.refused.join(" ")]);
  return make("div", "", { className: "card" }, [
    make("h3", `${run.method} ${run.run.slice(0, 8)}`),
    line(run.finished ? "finished" : `round ${run.told.length} of ${run.rounds}`, run.finished ? "state approved" : "state"),
    run.images && make("h4", `The model on this site's own ${number.format(run.images)} test images`), run.images && pairs(figures),
    run.report && line(`Report: ${run.report}`, "quiet"),
    rows.length && table(["round", "bytes up", "bytes down", "seconds", "refused"], rows, [0, 1, 2, 3]),
  ]);
}

function showBudget(state) {
  if (!state.budget.length) return [line("No privacy budget has been spent.")];
  const last = new Map(state.budget.map((each) => [each.run, each]));
  return [table(["run", "round", "hides", "epsilon spent", "delta"], [...last.values()].map((each) => [each.run.slice(0, 8), each.round, each.unit, each.epsilon.toFixed(2), each.delta]), [1, 3, 4])];
}

find("policy").addEventListener("submit", (event) => {
  event.preventDefault();
  drawn.rules = find("rules").value;
  act("/policy", { content: find("rules").value });
});

async function look() {
  try {
    show(await call("/state"));
  } catch (error) {
    say(error instanceof TypeError ? "The program has ended; start fedvl client again." : error.message);
  }
  setTimeout(look, EVERY);
}

look();
