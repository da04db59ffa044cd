//! `imagetool list`: lists images.

use std::cmp::Ordering;

use api::fault::FaultCode;
use api::image_server::{ImageSummary, ListImages, ListImagesRequest};
use comfy_table::{CellAlignment, Table, presets};
use futures_util::stream::{self, StreamExt as _, TryStreamExt as _};
use globset::{GlobBuilder, GlobMatcher};
use model::display::safe_lines;
use model::image::{ImageName, Package};
use serde::Serialize;
use tool::Format;

use super::{Context, VerbResult, get_image, print, print_json};
use crate::output::failure::{Failure, Outcome};
use crate::output::progress::Unit;
use crate::output::{size, time};
use crate::packages::printable;
use model::display::grouped;

/// Number of images that are fetched at a time.
const CONCURRENT_MAX: usize = 8;

/// Lists images.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Examples:
  imagetool list
  imagetool list base                        # base, and all below base/
  imagetool list --glob 'web/*-2024*' --sort created --reverse
  imagetool list --package 'openssl' --package 'libssl*=3.0.1*'
  imagetool list --format json | jq -r '.[].name'

In a glob `*` and `?` stop at a slash, `**` does not.")]
pub struct ListArgs {
    /// Only the image of this name and images below it.
    #[arg(value_name = "PREFIX")]
    pub prefix: Option<ImageName>,
    /// Only images whose whole name matches.
    #[arg(long, value_name = "GLOB", value_parser = glob_of)]
    pub glob: Option<GlobMatcher>,
    /// Only images with a package of this name and, if given, version; if repeated, with any of the
    /// packages. This reads each image.
    #[arg(long, value_name = "GLOB[=GLOB]", value_parser = package_pattern)]
    pub package: Vec<PackagePattern>,
    /// Sort order; equal images are sorted by name.
    #[arg(long, value_enum, value_name = "BY", default_value_t)]
    pub sort: SortBy,
    /// Reverse the order.
    #[arg(long)]
    pub reverse: bool,
}

/// Sort order of a list.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum SortBy {
    /// The name
    #[default]
    Name,
    /// Time when the image was added
    Created,
    /// Time when the image expires; images that never expire come last
    Expires,
    /// Total length of the files
    Size,
    /// Number of entries
    Entries,
}

/// A pattern of packages.
#[derive(Clone, Debug)]
pub struct PackagePattern {
    name: GlobMatcher,
    version: Option<GlobMatcher>,
}

impl PackagePattern {
    fn matches(&self, package: &Package) -> bool {
        let version = self.version.as_ref();
        self.name.is_match(&package.name)
            && version.is_none_or(|version| version.is_match(&package.version))
    }
}

fn package_pattern(text: &str) -> Result<PackagePattern, globset::Error> {
    let glob = |text: &str| Ok(GlobBuilder::new(text).build()?.compile_matcher());
    let (name, version) = match text.split_once('=') {
        Some((name, version)) => (name, Some(glob(version)?)),
        None => (text, None),
    };
    Ok(PackagePattern { name: glob(name)?, version })
}

/// An image in the list, with the matching packages.
#[derive(Clone, Debug, Serialize)]
struct ListedImage {
    #[serde(flatten)]
    image: ImageSummary,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    packages: Vec<Package>,
}

pub(super) fn glob_of(text: &str) -> Result<GlobMatcher, globset::Error> {
    let glob = GlobBuilder::new(text).literal_separator(true).build()?;
    Ok(glob.compile_matcher())
}

pub async fn run(context: &Context, args: ListArgs) -> VerbResult {
    let mut images: Vec<ImageSummary> = Vec::new();
    loop {
        let request = ListImagesRequest { after: images.last().map(|image| image.name.clone()) };
        let reply = context.client.call::<ListImages>(&request).await;
        let reply = reply.map_err(|error| Failure::from_call(&error))?;
        let progress = !reply.images.is_empty();
        images.extend(reply.images);
        if !reply.more || !progress {
            break;
        }
    }
    let images = with_packages(context, selected(images, &args), &args.package).await?;
    match context.format {
        Format::Json => print_json(&images)?,
        Format::Table if images.is_empty() => eprintln!("There are no images."),
        Format::Table => print(&safe_lines(&table(&images)))?,
    }
    Ok(Outcome::Done)
}

/// Returns the images with a package that matches one of `patterns`, or all without patterns.
async fn with_packages(
    context: &Context,
    images: Vec<ImageSummary>,
    patterns: &[PackagePattern],
) -> Result<Vec<ListedImage>, Failure> {
    if patterns.is_empty() {
        let listed = |image| ListedImage { image, packages: Vec::new() };
        return Ok(images.into_iter().map(listed).collect());
    }
    context.meter.start("Reading images", Unit::Items, Some(images.len() as u64));
    let lookups = images.into_iter().map(|image| async move {
        let found = match get_image(&context.client, &image.name).await {
            Ok(found) => found,
            // It was deleted meanwhile.
            Err(error) if matches!(error.code(), Some(FaultCode::Gone | FaultCode::NotFound)) => {
                return Ok(None);
            }
            Err(error) => return Err(Failure::from_image_call(&error, &image.name)),
        };
        context.meter.add(1);
        let mut packages = found.notes.packages;
        packages.retain(|package| patterns.iter().any(|patterns| patterns.matches(package)));
        Ok((!packages.is_empty()).then_some(ListedImage { image, packages }))
    });
    let lookups = stream::iter(lookups).buffered(CONCURRENT_MAX);
    let listed: Vec<Option<ListedImage>> = lookups.try_collect().await?;
    context.meter.finish();
    Ok(listed.into_iter().flatten().collect())
}

/// Filters and sorts `images`.
fn selected(mut images: Vec<ImageSummary>, args: &ListArgs) -> Vec<ImageSummary> {
    let is_below = |image: &ImageSummary, prefix: &ImageName| {
        let rest = image.name.as_str().strip_prefix(prefix.as_str());
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    };
    images.retain(|image| {
        args.prefix.as_ref().is_none_or(|prefix| is_below(image, prefix))
            && args.glob.as_ref().is_none_or(|glob| glob.is_match(image.name.as_str()))
    });
    images.sort_by(|left, right| {
        let never = |image: &ImageSummary| image.expires_at.is_none();
        let order = match args.sort {
            SortBy::Name => Ordering::Equal,
            SortBy::Created => left.created_on.cmp(&right.created_on),
            SortBy::Expires => {
                (never(left), left.expires_at).cmp(&(never(right), right.expires_at))
            }
            SortBy::Size => left.totals.bytes.cmp(&right.totals.bytes),
            SortBy::Entries => left.totals.entries.cmp(&right.totals.entries),
        };
        order.then_with(|| left.name.cmp(&right.name))
    });
    if args.reverse {
        images.reverse();
    }
    images
}

fn table(images: &[ListedImage]) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    // Empty columns are left out.
    let has_computed = images.iter().any(|one| one.image.totals.computed > 0);
    let has_tags = images.iter().any(|one| !one.image.tags.is_empty());
    let has_signatures = images.iter().any(|one| one.image.signatures > 0);
    let has_packages = images.iter().any(|one| !one.packages.is_empty());
    let mut head = vec!["NAME", "ENTRIES", "SIZE", "FILTER", "TRIGGERS", "CREATED", "EXPIRES"];
    head.extend(has_computed.then_some("COMPUTED"));
    head.extend(has_tags.then_some("TAGS"));
    head.extend(has_signatures.then_some("SIGNED"));
    head.extend(has_packages.then_some("PACKAGES"));
    table.set_header(head);
    for ListedImage { image, packages } in images {
        let mut row = vec![
            image.name.to_string(),
            grouped(image.totals.entries),
            size(image.totals.bytes),
            image.filter_lines.map_or("sparse".to_owned(), |lines| grouped(u64::from(lines))),
            grouped(u64::from(image.triggers)),
            time(image.created_on),
            image.expires_at.map_or("never".to_owned(), time),
        ];
        if has_computed {
            row.push(grouped(image.totals.computed));
        }
        if has_tags {
            row.push(super::change::lines(&image.tags).trim_end().replace('\n', ", "));
        }
        if has_signatures {
            row.push(grouped(u64::from(image.signatures)));
        }
        if has_packages {
            let words =
                packages.iter().map(|one| printable(&format!("{} {}", one.name, one.version)));
            row.push(words.collect::<Vec<_>>().join(", "));
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

#[cfg(test)]
mod tests {
    use clap::Parser as _;
    use model::object::Algorithm;
    use model::tree::{Time, Totals};

    use super::*;

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        list: ListArgs,
    }

    fn image(name: &str, bytes: u64, created: i64, expires: Option<i64>) -> ImageSummary {
        let at = |seconds| Time { seconds, nanoseconds: 0 };
        ImageSummary {
            tags: std::collections::BTreeMap::new(),
            signatures: 0,
            name: ImageName::new(name).unwrap(),
            digest: Algorithm::Blake3.digest(b""),
            root: Algorithm::Blake3.digest(b""),
            totals: Totals { bytes, ..Totals::default() },
            filter_lines: None,
            triggers: 0,
            created_on: at(created),
            expires_at: expires.map(at),
        }
    }

    #[test]
    fn images_are_chosen_and_sorted() {
        let all = [
            image("base", 1, 9, None),
            image("base/a", 5, 8, Some(3)),
            image("base/b/c", 3, 7, Some(2)),
            image("based", 4, 7, None),
        ];
        let names = |line: &str| {
            let words = ["list"].into_iter().chain(line.split_whitespace());
            let args = Line::parse_from(words).list;
            let selected = selected(all.to_vec(), &args);
            let names: Vec<&str> = selected.iter().map(|image| image.name.as_str()).collect();
            names.join(" ")
        };
        let table = [
            ("", "base base/a base/b/c based"),
            ("base", "base base/a base/b/c"),
            ("base/b", "base/b/c"),
            ("--glob base*", "base based"),
            ("--glob base/*", "base/a"),
            ("--glob base/**", "base/a base/b/c"),
            ("base --glob *", "base"),
            ("--sort size", "base base/b/c based base/a"),
            ("--sort created", "base/b/c based base/a base"),
            ("--sort expires", "base/b/c base/a base based"),
            ("--reverse", "based base/b/c base/a base"),
        ];
        for (line, want) in table {
            assert_eq!(names(line), want, "{line}");
        }
        assert!(Line::try_parse_from(["list", "--glob", "a[b"]).is_err());
    }
}
