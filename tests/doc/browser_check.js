// What is amiss on the page as it is shown now: a list of lines.
() => {
  const faults = new Set();
  const article = document.querySelector("article") || document.body;
  const width = document.documentElement.clientWidth;
  const name = (node) => `<${node.tagName.toLowerCase()}> ${(node.textContent || "").trim().replace(/\s+/g, " ").slice(0, 40)}`;
  const shown = (node) => node.getClientRects().length > 0 && getComputedStyle(node).visibility !== "hidden";
  const scrolls = (node) => {
    for (let above = node.parentElement; above && above !== document.body; above = above.parentElement)
      if (["auto", "scroll"].includes(getComputedStyle(above).overflowX)) return true;
    return ["auto", "scroll"].includes(getComputedStyle(node).overflowX);
  };

  if (document.documentElement.scrollWidth > width + 1) faults.add(`the page is ${document.documentElement.scrollWidth} px wide`);
  for (const node of article.querySelectorAll("table, pre, svg, img, .katex, .arithmatex, p, li"))
    if (shown(node) && node.getBoundingClientRect().right > width + 1 && !scrolls(node)) faults.add(`leaves the screen: ${name(node)}`);

  const height = document.documentElement.scrollHeight;
  if (height > 15000) faults.add(`the page is ${height} px high`);
  if (width > 1000) {
    for (const code of article.querySelectorAll("pre > code"))
      if (shown(code) && code.scrollWidth > code.clientWidth + 1) faults.add(`has to be scrolled: ${name(code)}`);
  }

  for (const picture of article.querySelectorAll("svg")) {
    if (!shown(picture) || picture.closest(".katex, a, button, label, .md-icon")) continue;
    const box = picture.viewBox.baseVal;
    if (!box || !box.width) { faults.add("a picture without viewBox"); continue; }
    const drawn = picture.getBBox();
    const slack = 0.02 * Math.max(box.width, box.height);
    const clipped = drawn.x < box.x - slack || drawn.y < box.y - slack ||
      drawn.x + drawn.width > box.x + box.width + slack || drawn.y + drawn.height > box.y + box.height + slack;
    if (clipped && getComputedStyle(picture).overflow !== "visible") faults.add(`a clipped picture: ${picture.getAttribute("aria-label") || name(picture)}`);
  }

  for (const box of article.querySelectorAll(".highlight code, pre > code"))
    if (shown(box) && !box.textContent.trim()) faults.add("an empty output box");
  for (const formula of article.querySelectorAll(".arithmatex:not(:has(.katex)), .katex-error"))
    faults.add(`a formula that is not set: ${name(formula)}`);

  for (const code of article.querySelectorAll("td code, th code")) {
    const texts = document.createTreeWalker(code, NodeFilter.SHOW_TEXT);
    while (texts.nextNode())
      for (const word of texts.currentNode.textContent.matchAll(/\w+/g)) {
        const range = document.createRange();
        range.setStart(texts.currentNode, word.index);
        range.setEnd(texts.currentNode, word.index + word[0].length);
        if (new Set([...range.getClientRects()].map((box) => box.top)).size > 1) faults.add(`cut in two: ${word[0]}`);
      }
  }

  // Contrast, once for each pair of colors.
  const probe = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const colors = new Map();
  const rgba = (color) => {
    if (!colors.has(color)) colors.set(color, painted(color));
    return colors.get(color);
  };
  const painted = (color) => {
    probe.clearRect(0, 0, 1, 1);
    probe.fillStyle = color;
    probe.fillRect(0, 0, 1, 1);
    return Array.from(probe.getImageData(0, 0, 1, 1).data, (part) => part / 255);
  };
  const over = (front, back) => front.slice(0, 3).map((part, i) => part * front[3] + back[i] * (1 - front[3])).concat(1);
  const grounds = new Map();
  const ground = (node) => {
    if (!node) return [1, 1, 1, 1];
    if (!grounds.has(node)) grounds.set(node, over(rgba(getComputedStyle(node).backgroundColor), ground(node.parentElement)));
    return grounds.get(node);
  };
  const light = (color) => {
    const [r, g, b] = color.map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const seen = new Set();
  const walker = document.createTreeWalker(article, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || !shown(node) || node.closest("svg, .katex-mathml, .headerlink, script, style")) continue;
    const style = getComputedStyle(node);
    const back = ground(node);
    const size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && parseInt(style.fontWeight) >= 700);
    const key = `${style.color} ${back} ${large}`;
    if (seen.has(key)) continue;
    seen.add(key);
    const [one, other] = [light(over(rgba(style.color), back)), light(back)].sort((a, b) => b - a);
    const ratio = (one + 0.05) / (other + 0.05);
    if (ratio < (large ? 3 : 4.5)) faults.add(`contrast ${ratio.toFixed(2)} of ${name(node)} (class ${node.className || "none"})`);
  }
  return [...faults];
}
