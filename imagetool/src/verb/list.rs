//! `imagetool list`: shows which images there are.

use comfy_table::{CellAlignment, Table, presets};
use common::api::image_server::{ImageSummary, ListImages, ListImagesRequest};
use common::tool::Format;

use super::{Context, Ended, print, print_json};
use crate::failure::{Failure, Outcome};
use crate::output::{count, size, time};

/// Lists the images, sorted by name.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Examples:
  imagetool --insecure list
  imagetool --insecure list --format json | jq -r '.[].name'")]
pub struct ListArgs {}

/// Lists images.
///
/// # Errors
///
/// [`Failure`] if the server cannot be asked.
pub async fn run(context: &Context, _args: ListArgs) -> Ended {
    let mut images: Vec<ImageSummary> = Vec::new();
    loop {
        let request = ListImagesRequest { after: images.last().map(|image| image.name.clone()) };
        let reply = context.client.call::<ListImages>(&request).await;
        let reply = reply.map_err(|error| Failure::of_call(&error))?;
        let progress = !reply.images.is_empty();
        images.extend(reply.images);
        if !reply.more || !progress {
            break;
        }
    }
    match context.format {
        Format::Json => print_json(&images)?,
        Format::Table if images.is_empty() => eprintln!("There are no images."),
        Format::Table => print(&table(&images))?,
    }
    Ok(Outcome::Done)
}

fn table(images: &[ImageSummary]) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    // Most fleets need none: a column of nothing would only take room.
    let has_tags = images.iter().any(|image| !image.tags.is_empty());
    let mut head = vec!["NAME", "ENTRIES", "SIZE", "FILTER", "TRIGGERS", "CREATED", "EXPIRES"];
    head.extend(has_tags.then_some("TAGS"));
    table.set_header(head);
    for image in images {
        let mut row = vec![
            image.name.to_string(),
            count(image.totals.entries),
            size(image.totals.bytes),
            image.filter_lines.map_or("sparse".to_owned(), |lines| count(u64::from(lines))),
            count(u64::from(image.triggers)),
            time(image.created_on),
            image.expires_at.map_or("never".to_owned(), time),
        ];
        if has_tags {
            row.push(super::tag::lines(&image.tags).trim_end().replace('\n', ", "));
        }
        table.add_row(row);
    }
    for index in [1, 2, 3, 4] {
        if let Some(column) = table.column_mut(index) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    if let Some(first) = table.column_mut(0) {
        first.set_padding((0, 1));
    }
    let lines = table.lines().map(|line| line.trim_end().to_owned() + "\n");
    lines.collect()
}
