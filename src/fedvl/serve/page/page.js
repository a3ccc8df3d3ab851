// Sends class names and images, shows predictions as they arrive. Images stay in the page; the service does not store them.
const find = (id) => document.getElementById(id);
const LARGEST_REQUEST = 30e6; // bytes; one image may be larger
const SHOWN_CLIENTS = 12, SHOWN_EXAMPLES = 14;
const EXTENSIONS = /\.(jpe?g|jpe|png|gif|webp|bmp|tiff?|ppm|pgm)$/i;
const percent = new Intl.NumberFormat("en", { style: "percent", maximumFractionDigits: 1 });

let token = new URLSearchParams(location.hash.slice(1)).get("token");
let run = null; // the served run
let session = null; // the current session, for the names in use
let images = []; // {file, url} by number, of all images since the start
let sent = 0; // number of images sent
let answered = 0, refused = 0, differing = 0, examples = 0;
let asking = Promise.resolve(), turn = 0; // a new turn stops the previous one

// --- the service

async function call(path, options = {}) {
  const headers = { ...options.headers, ...(token ? { authorization: `Bearer ${token}` } : {}) };
  const response = await fetch(path, { ...options, headers });
  if (response.ok) return response;
  if (response.status === 503) {
    await new Promise((resume) => setTimeout(resume, 1000 * Number(response.headers.get("retry-after") || 1)));
    return call(path, options);
  }
  const detail = await response.json().then((body) => body.detail, () => response.statusText);
  throw Object.assign(new Error(detail), { status: response.status });
}

async function* linesOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) yield JSON.parse(line);
  }
}

async function begin() {
  const body = {};
  if (run.new_classes) body.classes = namesTyped();
  if (find("client").value) body.client = Number(find("client").value);
  const response = await call("sessions", { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) });
  return response.json();
}

function nextRequest() {
  const form = new FormData();
  let bytes = 0, count = 0;
  while (sent + count < images.length && count < Math.min(session.batch_size, 18)) {
    const { file } = images[sent + count];
    if (count && bytes + file.size > LARGEST_REQUEST) break;
    bytes += file.size;
    count += 1;
    form.append("files", file, file.name);
  }
  return { form, count };
}

async function askAll(mine) {
  say("");
  try {
    if (!session) {
      status("Building the model for these names …");
      const made = await begin();
      if (mine !== turn) return;
      session = made;
      showLeaning();
      showMemory();
    }
    while (sent < images.length && mine === turn) {
      const { form, count } = nextRequest();
      const response = await call(`sessions/${session.id}/images`, { method: "POST", body: form });
      sent += count;
      for await (const line of linesOf(response)) {
        if (mine !== turn) return;
        show(line);
      }
    }
  } catch (error) {
    if (mine !== turn) return;
    if (error.status === 401) return void (find("ask-token").hidden = false);
    if (error.status === 404) session = null;
    say(error.status === 404 ? "The session has expired. Change the names, or start over." : error.message);
  }
}

// Classify new images; after a change of names, all images again.
function ask(anew = false) {
  if (anew && session) call(`sessions/${session.id}`, { method: "DELETE" }).catch(() => {});
  if (anew) {
    session = null;
    sent = answered = refused = differing = examples = 0;
    turn += 1;
    find("answers").replaceChildren();
    find("prototypes").replaceChildren();
    find("remembered").textContent = "";
  }
  if (!images.length || !run) return; // images dropped early are sent once the run is known
  if (run.new_classes && !namesTyped().length) {
    say("Enter class names first.");
    return find("names").focus();
  }
  find("toolbar").hidden = find("stage").hidden = false;
  const mine = turn;
  asking = asking.then(() => mine === turn && askAll(mine));
}

// --- display

function say(sentence) {
  find("notice").textContent = sentence;
  find("notice").hidden = !sentence;
}

function status(sentence) {
  find("status").textContent = sentence;
}

function bars(list, ranked) {
  list.replaceChildren(...ranked.map(({ name, score, width = score }) => {
    const item = document.createElement("li");
    item.style.setProperty("--share", `${100 * width}%`);
    item.append(span("name", name), span("number", percent.format(score)));
    item.firstChild.title = name;
    return item;
  }));
}

function span(kind, text) {
  const made = document.createElement("span");
  made.className = kind;
  made.textContent = text;
  return made;
}

function show(line) {
  const card = find("answer").content.firstElementChild.cloneNode(true);
  const picture = card.querySelector("img");
  const { url, file } = images[line.number];
  card.querySelector("figcaption").textContent = picture.title = file.name;
  picture.onerror = () => card.classList.add("unseeable");
  picture.src = url;
  if (line.refused) {
    refused += 1;
    card.classList.add("refused", "unseeable");
    card.querySelector(".said").textContent = `Refused: ${line.refused}`;
  } else {
    answered += 1;
    picture.alt = `${file.name}: ${line.ranked[0].name}`;
    const lists = [line.ranked.slice(0, 4), line.zero_shot.slice(0, 4)];
    const most = Math.max(...lists.flat().map(({ score }) => score)); // one scale, since the two are compared
    const scaled = lists.map((list) => list.map(({ name, score }) => ({ name, score, width: score / most })));
    bars(card.querySelector(".federated .bars"), scaled[0]);
    bars(card.querySelector(".zero-shot .bars"), scaled[1]);
    const differs = line.ranked[0].name !== line.zero_shot[0].name;
    card.classList.toggle("differs", differs);
    differing += differs;
    const mark = card.querySelector(".mark");
    mark.append(span("entropy", `entropy ${line.entropy.toFixed(2)}`));
    mark.title = `Entropy of the shares of all names, in nats: 0 is certain, ${Math.log(session.classes.length).toFixed(2)} is even.`;
    if (line.above_threshold) {
      mark.prepend(span("above", line.above_threshold.length ? `above threshold: ${line.above_threshold.join(", ")}` : "no class above its threshold"));
    }
    if (line.prototype_of !== null) {
      mark.prepend(span("remembered", `prototype of ${line.prototype_of}`));
      remember(line.prototype_of, url);
    }
  }
  find("answers").append(card);
  showStatus();
}

function showStatus() {
  const done = answered + refused;
  const parts = [done < images.length ? `${done} of ${images.length} classified` : `${answered} ${answered === 1 ? "image" : "images"} classified`];
  if (refused) parts.push(`${refused} refused`);
  if (document.body.classList.contains("comparing")) {
    parts.push(differing ? `zero-shot differs on ${differing}` : "zero-shot agrees");
  }
  status(parts.join(" · "));
}

function showLeaning() {
  const weights = [...session.client_weights].sort((one, other) => other.weight - one.weight);
  find("leaning").hidden = !weights.length;
  const most = Math.max(...weights.map(({ weight }) => weight));
  bars(find("clients"), weights.slice(0, SHOWN_CLIENTS).map(({ client, weight }) => ({ name: `Client ${client}`, score: weight, width: weight / most })));
  if (weights.length > SHOWN_CLIENTS) find("clients").append(Object.assign(document.createElement("li"), { textContent: `and ${weights.length - SHOWN_CLIENTS} more`, className: "none" }));
}

function showMemory() {
  find("memory").hidden = !session.remembers;
}

function remember(name, url) {
  let row = [...find("prototypes").children].find((each) => each.dataset.name === name);
  if (!row) {
    row = document.createElement("li");
    row.dataset.name = name;
    row.append(document.createElement("h3"), document.createElement("div"));
    row.firstChild.append(span("name", name), span("number", "0"));
    row.firstChild.title = name;
    row.lastChild.className = "strip";
    find("prototypes").append(row);
  }
  examples += 1;
  find("remembered").textContent = `${examples}`;
  row.firstChild.lastChild.textContent = Number(row.firstChild.lastChild.textContent) + 1;
  const picture = document.createElement("img");
  picture.src = url;
  picture.alt = "";
  row.lastChild.prepend(picture);
  if (row.lastChild.children.length > SHOWN_EXAMPLES) row.lastChild.lastChild.remove();
}

// --- user input

function namesTyped() {
  return [...new Set(find("names").value.split(/[,;\n]/).map((name) => name.trim()).filter(Boolean))];
}

function countNames() {
  const count = namesTyped().length;
  find("names-hint").textContent = count ? `${count} ${count === 1 ? "name" : "names"}` : "Any names, separated by commas or line breaks.";
}

function add(files) {
  images.push(...[...files].map((file) => ({ file, url: URL.createObjectURL(file) })));
  ask();
}

async function filesOf(entry) {
  if (entry.isFile) {
    const file = await new Promise((give, fail) => entry.file(give, fail));
    return [file];
  }
  const reader = entry.createReader(), found = [];
  for (;;) { // a reader returns up to a hundred entries at a time
    const some = await new Promise((give, fail) => reader.readEntries(give, fail));
    if (!some.length) break;
    for (const each of some) found.push(...(await filesOf(each)).filter(({ name }) => each.isDirectory || EXTENSIONS.test(name)));
  }
  return found;
}

function startOver() {
  images.forEach(({ url }) => URL.revokeObjectURL(url));
  images = [];
  ask(true);
  find("toolbar").hidden = find("stage").hidden = true;
  say("");
}

find("question").addEventListener("submit", (event) => event.preventDefault());
find("names").addEventListener("input", countNames);
find("names").addEventListener("change", () => ask(true));
find("names").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) find("names").blur();
});
find("client").addEventListener("change", () => ask(true));
find("files").addEventListener("change", ({ target }) => { add(target.files); target.value = ""; });
find("folder").addEventListener("change", ({ target }) => {
  add([...target.files].filter(({ name }) => EXTENSIONS.test(name)));
  target.value = "";
});
find("clear").addEventListener("click", startOver);
find("compare").addEventListener("click", () => {
  const on = document.body.classList.toggle("comparing");
  find("compare").setAttribute("aria-pressed", on);
  showStatus();
});
find("ask-token").addEventListener("submit", (event) => {
  event.preventDefault();
  token = find("token").value;
  history.replaceState(null, "", `#token=${encodeURIComponent(token)}`);
  find("ask-token").hidden = true;
  open();
});
if (matchMedia("(max-width: 860px)").matches) find("leaning").open = find("memory").open = false; // predictions first
let depth = 0; // entering an inner element also leaves the outer one
addEventListener("dragenter", () => { depth += 1; document.body.classList.add("dragging"); });
addEventListener("dragleave", () => { depth -= 1; if (!depth) document.body.classList.remove("dragging"); });
addEventListener("dragover", (event) => event.preventDefault());
addEventListener("drop", async (event) => {
  event.preventDefault();
  depth = 0;
  document.body.classList.remove("dragging");
  const entries = [...event.dataTransfer.items].map((item) => item.webkitGetAsEntry()).filter(Boolean);
  add((await Promise.all(entries.map(filesOf))).flat());
});

async function open() {
  try {
    run = await (await call("run")).json();
  } catch (error) {
    if (error.status === 401) return void (find("ask-token").hidden = false);
    return say(error.message);
  }
  find("about").textContent = `${run.method} on ${run.model}, trained by ${run.clients} ${run.clients === 1 ? "client" : "clients"} on ${run.dataset.split("/").pop()}`;
  if (run.temperature !== null) find("about").textContent += `. Shares are calibrated: scores are divided by a temperature of ${run.temperature.toPrecision(2)}, fitted on training images`;
  if (!find("names").value || !run.new_classes) find("names").value = run.classes.join(", ");
  find("names").readOnly = !run.new_classes;
  countNames();
  if (!run.new_classes) {
    find("lead").textContent = "Drop images: the model ranks the class names for each image.";
    find("names-hint").textContent = "This method only predicts the classes it was trained on.";
  }
  find("personal").hidden = !run.personal;
  if (run.personal) {
    for (let client = 0; client < run.clients; client += 1) find("client").append(new Option(`client ${client}`, client));
  }
  if (images.length) ask();
}
open();
