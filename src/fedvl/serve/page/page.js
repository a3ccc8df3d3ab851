// Sends class names and images, shows predictions as they arrive. Images stay in the page; the service does not store them.
const find = (id) => document.getElementById(id);
const LARGEST_REQUEST = 30e6; // bytes; one image may be larger
const SHOWN_CLIENTS = 12, SHOWN_EXAMPLES = 14;
const EXTENSIONS = /\.(jpe?g|jpe|png|gif|webp|bmp|tiff?|ppm|pgm|hei[cf]|dcm)$|^(?!DICOMDIR$)[^.]+$/i; // DICOM often has none
const percent = new Intl.NumberFormat("en", { style: "percent", maximumFractionDigits: 1 });

let token = new URLSearchParams(location.hash.slice(1)).get("token");
let run = null; // the served run
let session = null; // the current session, for the names in use
let images = []; // {file, url, line} by number, of all images since the start
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

// Show an image; of a format that the browser does not show, a small copy from the service.
async function showPicture(picture, number, onfail = () => {}) {
  const image = images[number];
  picture.onerror = async () => {
    picture.onerror = onfail;
    image.preview ??= previewOf(image.file);
    const url = await image.preview;
    if (url) picture.src = url;
    else onfail();
  };
  picture.src = image.url;
}

async function previewOf(file) {
  if (file.size > run.limits.file_bytes) return null;
  const form = new FormData();
  form.append("files", file, file.name);
  try {
    return URL.createObjectURL(await (await call("preview", { method: "POST", body: form })).blob());
  } catch {
    return null; // the image was refused, which its answer says
  }
}

function show(line) {
  const card = find("answer").content.firstElementChild.cloneNode(true);
  const picture = card.querySelector("img");
  const { file } = images[line.number];
  images[line.number].line = line;
  card.querySelector("figcaption").textContent = picture.title = file.name;
  card.number = line.number;
  card.doubt = line.refused ? -1 : line.entropy;
  if (line.refused) picture.src = images[line.number].url;
  else showPicture(picture, line.number, () => card.classList.add("unseeable"));
  if (line.refused) {
    refused += 1;
    card.classList.add("refused", "unseeable");
    card.querySelector(".said").textContent = `Refused: ${line.refused}`;
  } else {
    answered += 1;
    picture.alt = `${file.name}: ${line.ranked[0].name}`;
    const lists = [line.ranked.slice(0, 4), line.zero_shot.slice(0, 4)];
    bars(card.querySelector(".federated .bars"), lists[0]);
    bars(card.querySelector(".zero-shot .bars"), lists[1]);
    const differs = line.ranked[0].name !== line.zero_shot[0].name;
    card.classList.toggle("differs", differs);
    differing += differs;
    const mark = card.querySelector(".mark");
    mark.append(span("entropy", doubtInWords(line.entropy)));
    if (line.unsure) {
      card.classList.add("unsure");
      mark.prepend(span("unsure-mark", `unsure: below ${percent.format(run.unsure)}`));
    }
    showTested(card.querySelector(".tested"), line.ranked[0].name);
    mark.title = `Entropy of the shares of all names, in nats: 0 is certain, ${Math.log(session.classes.length).toFixed(2)} is even.`;
    if (line.above_threshold) {
      mark.prepend(span("above", line.above_threshold.length ? `above threshold: ${line.above_threshold.join(", ")}` : "no class above its threshold"));
    }
    if (line.prototype_of !== null) {
      mark.prepend(span("remembered", `prototype of ${line.prototype_of}`));
      remember(line.prototype_of, line.number);
    }
    if (run.reports) card.querySelector(".said").append(reportForm(line));
  }
  place(card);
  showStatus();
}

// An entropy of H nats is that of an even choice between exp(H) names.
function doubtInWords(entropy) {
  const names = Math.exp(entropy);
  return names < 1.05 ? `entropy ${entropy.toFixed(2)}: nearly all on one name` : `entropy ${entropy.toFixed(2)}: as unsure as between ${names.toFixed(1)} names`;
}

// What the test of the run says of a class; nothing if other names are in use.
function showTested(line, name) {
  const known = new Map(run.tested.map((each) => [each.name, each]));
  const tested = known.get(name);
  if (!tested || known.size !== session.classes.length || !session.classes.every((each) => known.has(each))) return;
  const recall = tested.images ? `${tested.recognised} of ${tested.images} test images recognised` : "no test image";
  const precision = tested.named ? `; right in ${tested.recognised} of ${tested.named} such answers` : "";
  line.textContent = `${name}: ${recall}${precision}`;
  line.hidden = false;
}

// Add a card at the end, or where its doubt belongs.
function place(card) {
  const sorted = find("doubt").getAttribute("aria-pressed") === "true";
  const next = sorted ? [...find("answers").children].find((each) => each.doubt < card.doubt) : null;
  find("answers").insertBefore(card, next ?? null);
}

function reportForm(line) {
  const made = find("wrong").content.firstElementChild.cloneNode(true);
  const form = made.querySelector("form");
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const { file } = images[line.number];
    const body = new FormData();
    body.append("image", file.name.slice(0, 300));
    body.append("answer", line.ranked[0].name);
    body.append("share", line.ranked[0].score);
    body.append("truth", form.elements.truth.value);
    body.append("remark", form.elements.remark.value);
    if (form.elements.picture.checked) body.append("picture", file, file.name);
    const sent = form.querySelector(".sent");
    try {
      await call("reports", { method: "POST", body });
      sent.textContent = "Sent. Thank you.";
      form.querySelector("button").disabled = true;
    } catch (error) {
      sent.textContent = error.message;
    }
  });
  return made;
}

// --- CSV, as fedvl predict --csv writes it

function csvCell(value) {
  const text = String(value ?? "").replace(/[\u0000-\u0008\u000b-\u001f\u007f]/g, "\ufffd");
  const safe = typeof value === "string" && /^[=+\-@\t]/.test(text) ? `'${text}` : text;
  return /[",\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}

function csvText() {
  const lines = images.map(({ line }) => line).filter(Boolean);
  const ranks = Math.max(1, ...lines.map((line) => line.ranked?.length ?? 0));
  const named = Array.from({ length: ranks - 1 }, (_, rank) => [`name_${rank + 2}`, `score_${rank + 2}`]).flat();
  const rows = lines.map((line) => {
    const ranked = Array.from({ length: ranks }, (_, rank) => [line.ranked?.[rank]?.name, line.ranked?.[rank]?.score]).flat();
    const answer = line.unsure ? "unsure" : line.ranked?.[0].name;
    const zeroShot = line.zero_shot?.[0];
    const rest = [line.entropy, line.prototype_of, zeroShot?.name, zeroShot?.score, line.above_threshold?.join("; "), line.refused];
    return [images[line.number].file.name, answer, ...ranked, ...rest];
  });
  const head = ["image", "answer", "name", "score", ...named, "entropy", "prototype_of", "zero_shot_name", "zero_shot_score", "above_threshold", "refused"];
  return [head, ...rows].map((row) => `${row.map(csvCell).join(",")}\r\n`).join("");
}

function download() {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob(["\ufeff", csvText()], { type: "text/csv" })); // the mark tells Excel that it is UTF-8
  link.download = "predictions.csv";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
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

function remember(name, number) {
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
  showPicture(picture, number);
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
  images.forEach(({ url, preview }) => {
    URL.revokeObjectURL(url);
    preview?.then((made) => made && URL.revokeObjectURL(made));
  });
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
find("download").addEventListener("click", download);
find("doubt").addEventListener("click", () => {
  const on = find("doubt").getAttribute("aria-pressed") !== "true";
  find("doubt").setAttribute("aria-pressed", on);
  const cards = [...find("answers").children];
  find("answers").append(...cards.sort(on ? (one, other) => other.doubt - one.doubt : (one, other) => one.number - other.number));
});
find("show-card").addEventListener("click", async () => {
  try {
    find("card-text").textContent = await (await call("card")).text();
    find("card").showModal();
  } catch (error) {
    say(error.message);
  }
});
find("example").addEventListener("click", async () => {
  try {
    add([new File([await (await call("example")).blob()], run.example)]);
  } catch (error) {
    say(error.message);
  }
});
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
  find("about").textContent = `${run.method} on ${run.model}, trained by ${run.clients} ${run.clients === 1 ? "client" : "clients"} on ${run.dataset.split("/").filter(Boolean).pop()}`;
  if (run.temperature !== null) find("about").textContent += `. Shares are calibrated: scores are divided by a temperature of ${run.temperature.toPrecision(2)}, fitted to ${run.temperature_from ?? "training images"}`;
  find("measured").hidden = false;
  if (run.accuracy !== null) {
    const [low, high] = run.accuracy_interval;
    find("accuracy").textContent = `Tested on ${run.test_images.toLocaleString("en")} images: ${run.accuracy.toFixed(1)} % right (95 % interval ${low.toFixed(1)} to ${high.toFixed(1)}).`;
  }
  find("example").hidden = run.example === null;
  find("classes").append(...run.classes.map((name) => new Option(name)));
  if (!find("names").value || !run.new_classes) find("names").value = run.classes.join(", ");
  find("names").readOnly = !run.new_classes;
  countNames();
  if (!run.new_classes) {
    find("lead").textContent = "Drop images: the model ranks the class names for each image.";
    find("names-hint").textContent = "This method only predicts the classes it was trained on.";
  }
  if (run.unsure !== null) find("lead").textContent += ` Answers below ${percent.format(run.unsure)} are marked as unsure.`;
  find("personal").hidden = !run.personal;
  if (run.personal) {
    for (let client = 0; client < run.clients; client += 1) find("client").append(new Option(`client ${client}`, client));
  }
  if (images.length) ask();
}
open();
