// Times are in the reader's own zone, which is named, and in UTC when the pointer is over them.
const inZone = new Intl.DateTimeFormat("sv", { dateStyle: "short", timeStyle: "medium" });
const ofZone = new Intl.DateTimeFormat("en", { timeZoneName: "short" });

function showLocally(element) {
  const at = new Date(element.dateTime);
  if (Number.isNaN(at.getTime())) return;
  const zone = ofZone.formatToParts(at).find(({ type }) => type === "timeZoneName").value;
  const text = `${inZone.format(at)} ${zone}`; // Swedish dates are ISO 8601
  if (element.textContent === text) return;
  element.textContent = text;
  element.title = element.dateTime.replace("T", " ").replace("Z", " UTC");
}

// Called before the changes are painted.
new MutationObserver(() => {
  document.querySelectorAll("time[datetime]").forEach(showLocally);
}).observe(document.documentElement, {
  attributeFilter: ["datetime"],
  characterData: true,
  childList: true,
  subtree: true,
});
