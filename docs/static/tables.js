// On a phone, the rows of a table of three columns are blocks. Each cell then shows the title of its column.
addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll(".content table.docutils")) {
    const titles = [...table.querySelectorAll("thead th")].map((title) => title.textContent.trim());
    for (const row of titles.length === 3 ? table.tBodies[0].rows : []) {
      [...row.cells].forEach((cell, column) => {
        if (column && titles[column] && cell.textContent.trim()) cell.dataset.title = titles[column];
      });
    }
  }
});
