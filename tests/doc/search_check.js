// The theme's own worker, outside of a browser: the addresses of the first two hits of each query.
const fs = require("fs"), path = require("path"), vm = require("vm");
const [site, ...queries] = process.argv.slice(1);
const folder = path.join(site, "assets/javascripts/workers");
const script = fs.readdirSync(folder).find(name => /^search\..*\.js$/.test(name));
let hear, answer;
const self = {
  addEventListener: (_, listener) => { hear = listener; },
  postMessage: message => answer(message),
  importScripts: () => {},
  console,
};
self.self = self;
vm.createContext(self);
vm.runInContext(fs.readFileSync(path.join(folder, script), "utf-8"), self);
const ask = (type, data) => new Promise(done => { answer = done; hear({data: {type, data}}); });
(async () => {
  const index = JSON.parse(fs.readFileSync(path.join(site, "search/search_index.json"), "utf-8"));
  await ask(0, {...index, options: {suggest: false}});
  const first = [];
  for (const query of queries) first.push((await ask(2, query)).data.items.slice(0, 2).map(hit => hit[0].location));
  console.log(JSON.stringify(first));
})();
