// The box that looks for an operation in operations.json; the data come when somebody types.
(() => {
  const box = document.getElementById("operation");
  const list = document.getElementById("operations");
  const item = (kind, text) => Object.assign(document.createElement(kind), {textContent: text});
  let rows;
  box.addEventListener("input", async () => {
    rows ??= fetch("../../assets/operations.json").then((answer) => answer.json());
    const all = await rows;
    const sought = box.value.trim().toLowerCase();
    const found = sought ? all.filter(([name]) => name.toLowerCase().includes(sought)) : [];
    list.replaceChildren(...found.slice(0, 10).flatMap(([name, verdicts]) => [
      item("dt", name),
      ...verdicts.map(([verdict, routes]) => item("dd", `${verdict}: ${routes}`)),
    ]));
    if (found.length > 10) list.append(item("dt", `and ${found.length - 10} more`));
  });
})();
