/* Browsers do not let a page of a local disk read other pages. The search page then reads their texts from a script. */
if (location.protocol === "file:") {
  const root = document.documentElement.dataset.content_root;
  const loaded = new Promise((resolve) => {
    const script = document.createElement("script");
    script.src = `${root}_static/page_texts.js`;
    script.onload = resolve;
    document.head.append(script);
  });
  window.fetch = async (address) => {
    await loaded;
    return new Response(PAGE_TEXTS[address.slice(root.length)] ?? "");
  };
}
