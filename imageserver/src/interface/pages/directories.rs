//! The page `/directories`: where images are, how much, and who owns it.

use api::fault::Fault;
use api::image_server::directories::DirectorySummary;
use model::image::ImageName;
use rpc::page_frame::{Cell, Frame, path_escape, table};
use rpc::server::{Page, PageRequest};

use super::{name_of, size, time};
use crate::interface::methods::sums;
use crate::store::Store;

/// How many directories are on one page.
const PAGE_DIRECTORIES_MAX: usize = 1_000;

/// Makes the page.
pub(super) fn directories(
    store: &Store,
    frame: &Frame,
    request: &PageRequest,
) -> Result<Page, Fault> {
    let below = name_of(request, "below")?;
    let after = name_of(request, "after")?;
    let (all, more) = store.directories.now().list(
        &sums(store),
        below.as_ref(),
        after.as_ref(),
        PAGE_DIRECTORIES_MAX,
    );
    let mut body = intro(store, below.as_ref());
    if all.is_empty() {
        body.push_str("<p>None yet. Make one with <code>imagetool mkdir</code>.</p>\n");
    } else {
        let rows: Vec<Vec<Cell>> = all.iter().map(row).collect();
        let head = ["Directory", "Owners", "Made", "Images", "With those below", "Size of these"];
        body.push_str(&table(&head, &rows));
    }
    if let Some(last) = all.last().filter(|_| more) {
        let below = below.map(|name| format!("below={}&amp;", path_escape(name.as_str())));
        let (below, after) = (below.unwrap_or_default(), path_escape(last.name.as_str()));
        body.push_str(&format!(
            "<p><a href=\"/directories?{below}after={after}\">More directories</a></p>\n"
        ));
    }
    Ok(Page::Html(frame.render("Directories", &body)))
}

fn intro(store: &Store, below: Option<&ImageName>) -> String {
    let made = match store.directories.now().count() {
        1 => "1 directory was made".to_owned(),
        count => format!("{count} directories were made"),
    };
    let shown = below.map_or_else(String::new, |_| {
        " Shown is one of them: <a href=\"/directories\">all</a>.".to_owned()
    });
    format!(
        "<p>{made} with <code>imagetool mkdir</code>; others are there by the images in them, \
         and belong to the owners of the one above. Owners of a directory own all below \
         it.{shown}</p>\n"
    )
}

fn row(directory: &DirectorySummary) -> Vec<Cell> {
    let DirectorySummary { name, made_on, owners, images, images_below, bytes_below } = directory;
    let path = format!("/directories?below={}", path_escape(name.as_str()));
    let nobody = owners.is_empty();
    vec![
        Cell::Link { path, text: name.to_string() },
        Cell::Text(if nobody { String::new() } else { owners.in_words() }),
        Cell::Text(made_on.map_or_else(|| "by its images".to_owned(), time)),
        Cell::Number(images.to_string()),
        Cell::Number(images_below.to_string()),
        Cell::Number(size(*bytes_below)),
    ]
}
