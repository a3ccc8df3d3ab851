const choice = document.getElementById("choice");
const rows = [...document.querySelectorAll("#images li")];
const download = document.getElementById("download");

function show() {
  const { kind, true: truth, predicted } = choice.elements;
  let count = 0;
  for (const row of rows) {
    const fits = (!kind.value || row.dataset.kinds.split(" ").includes(kind.value))
      && (!truth.value || row.dataset.true === truth.value) && (!predicted.value || row.dataset.predicted === predicted.value);
    row.hidden = !fits;
    row.style.display = fits ? "" : "none";
    count += fits;
  }
  document.getElementById("status").textContent = `${count} of ${rows.length} images.`;
}

// The cells of the report's confusion matrix lead here by the numbers of their classes.
function follow() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  for (const name of ["kind", "true", "predicted"]) if (wanted.has(name)) choice.elements[name].value = wanted.get(name);
  show();
}

function corrections() {
  return rows.flatMap((row) => {
    const [label, leave] = row.querySelectorAll(".correct input");
    const changed = leave.checked || label.value.trim();
    row.classList.toggle("changed", Boolean(changed));
    return changed ? [[row.dataset.file, leave.checked ? "" : label.value.trim()]] : [];
  });
}

const cell = (text) => (/[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);

choice.addEventListener("change", show);
choice.addEventListener("submit", (event) => event.preventDefault());
document.getElementById("images").addEventListener("input", () => { download.disabled = !corrections().length; });
download.addEventListener("click", () => {
  const text = [["file", "truth"], ...corrections()].map((row) => `${row.map(cell).join(",")}\r\n`).join("");
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
  link.download = "corrected.csv";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
});
addEventListener("hashchange", follow);
follow();
