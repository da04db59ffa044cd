//! Ready sets of powers: what each role calls, and no more.
//!
//! A set names everything that its role calls, also what any certificate may call, so that a
//! certificate goes on to be enough should the rule of a method become stricter. No set has a
//! method that gives its holder more than the role has anyway.
// tidy: core

use api::access::{Access, Powers};
use api::certificate::is_pattern;
use api::methods;

/// A role that certificates are made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Set {
    /// A dominator: drives subs, reads images, follows an mdbd
    Dominator,
    /// An imageserver, which may follow another one and send changes to it
    Imageserver,
    /// A sub: gets objects
    Subd,
    /// An mdbd: is asked, and calls no daemon
    Mdbd,
    /// Somebody who gives the dominator orders, and reads everything but files of machines
    Operator,
    /// Somebody, or a build system, who adds images, wherever they belong
    Uploader,
    /// As uploader, but only into directories that the holder or one of its groups owns
    Contributor,
    /// Somebody who reads, and changes nothing
    Viewer,
}

/// What reading images takes.
const IMAGES: &[&str] = &[
    "ImageServer.EstimateImage",
    "ImageServer.FindLatestImage",
    "ImageServer.GetImage",
    "ImageServer.GetReplication",
    "ImageServer.ListDirectories",
    "ImageServer.ListImages",
    "ObjectServer.CheckObjects",
    "ObjectServer.GetObjects",
];

/// What it takes to read what machines are and have, files aside.
const MACHINES: &[&str] =
    &["MdbServer.GetMdb", "Subd.GetConfiguration", "Subd.GetDirectories", "Subd.Poll"];

/// What it takes to read what a dominator knows.
const FLEET: &[&str] = &[
    "Dominator.CheckMdb",
    "Dominator.Explain",
    "Dominator.GetConfiguration",
    "Dominator.GetStatus",
    "Dominator.ListEvents",
    "Dominator.ListSubs",
    "Dominator.PlanMachine",
    "Dominator.PlanMachines",
    "Dominator.ShowMdb",
    "Dominator.ShowSub",
    "Dominator.WatchSub",
];

impl Set {
    /// All sets.
    pub const ALL: [Self; 8] = [
        Self::Dominator,
        Self::Imageserver,
        Self::Subd,
        Self::Mdbd,
        Self::Operator,
        Self::Uploader,
        Self::Contributor,
        Self::Viewer,
    ];

    /// The name on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Dominator => "dominator",
            Self::Imageserver => "imageserver",
            Self::Subd => "subd",
            Self::Mdbd => "mdbd",
            Self::Operator => "operator",
            Self::Uploader => "uploader",
            Self::Contributor => "contributor",
            Self::Viewer => "viewer",
        }
    }

    /// The patterns of the methods that the role calls.
    #[must_use]
    pub fn powers(self) -> Vec<String> {
        let lists: &[&[&str]] = match self {
            Self::Dominator => &[&[
                "ImageServer.GetImage",
                "ImageServer.HoldImages",
                "MdbServer.GetMdb",
                "ObjectServer.GetObjects",
                "Subd.Cleanup",
                "Subd.Commit",
                "Subd.Fetch",
                "Subd.GetDirectories",
                "Subd.OfferImage",
                "Subd.Poll",
                "Subd.Prepare",
                "Subd.ScanNow",
                "Subd.SetConfiguration",
            ]],
            Self::Imageserver => &[&[
                "ImageServer.Forward",
                "ImageServer.GetImage",
                "ImageServer.GetImageUpdates",
                "ImageServer.GetMadeDirectories",
                "ObjectServer.AddObjects",
                "ObjectServer.CheckObjects",
                "ObjectServer.GetObjects",
            ]],
            Self::Subd => &[&["ObjectServer.GetObjects"]],
            Self::Mdbd => &[],
            // By hand, a machine can be paused and scanned while there is no dominator to order
            // it. Files of machines are left out: secrets of other teams are among them.
            Self::Operator => {
                let orders: &[&str] = &["Dominator.*", "Subd.Pause", "Subd.Resume", "Subd.ScanNow"];
                &[orders, IMAGES, MACHINES]
            }
            Self::Uploader => &[&["ImageServer.AddImage", "ObjectServer.AddObjects"], IMAGES],
            Self::Contributor => &[&["ObjectServer.AddObjects"], IMAGES],
            Self::Viewer => &[IMAGES, MACHINES, FLEET],
        };
        let mut powers: Vec<&str> = lists.concat();
        powers.sort_unstable();
        powers.into_iter().map(str::to_owned).collect()
    }
}

/// A pattern that gives no power.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PatternError {
    /// It has not the form of one.
    #[error(
        "`{pattern}` is no pattern of methods: write Service.Method, with * for any letters, such \
         as 'Dominator.*', or '*' for everything"
    )]
    Form {
        /// What was given, escaped.
        pattern: String,
    },
    /// It matches nothing.
    #[error("`{pattern}` matches no method{}", meant(.near))]
    Nothing {
        /// What was given.
        pattern: String,
        /// Names of methods that may be meant.
        near: Vec<&'static str>,
    },
}

fn meant(near: &[&str]) -> String {
    if near.is_empty() { String::new() } else { format!("; there are {}", near.join(", ")) }
}

/// The pattern that an operator means by `text`: `*` is everything, others are as they stand.
///
/// # Errors
///
/// [`PatternError`] if it would give no power.
pub fn pattern(text: &str) -> Result<String, PatternError> {
    if text == "*" {
        return Ok("*.*".to_owned());
    }
    if !is_pattern(text) {
        return Err(PatternError::Form { pattern: model::escape::escape(text.as_bytes()) });
    }
    if allowed([text]).is_empty() {
        return Err(PatternError::Nothing { pattern: text.to_owned(), near: near(text) });
    }
    Ok(text.to_owned())
}

/// The methods that `patterns` match, in order of name. Reserved ones are among them.
#[must_use]
pub fn allowed<Text: Into<String>>(patterns: impl IntoIterator<Item = Text>) -> Vec<&'static str> {
    let powers = Powers::new(patterns);
    methods().into_iter().map(|method| method.name).filter(|name| powers.has(name)).collect()
}

/// The methods that any certificate may call, in order of name.
#[must_use]
pub fn allowed_to_all() -> Vec<&'static str> {
    let open = methods().into_iter().filter(|method| method.access == Access::Authenticated);
    open.map(|method| method.name).collect()
}

/// Methods that look like `text`: all of its service, or the same name in others.
fn near(text: &str) -> Vec<&'static str> {
    let Some((service, name)) = text.split_once('.') else { return Vec::new() };
    let part = |method: &'static str| method.split_once('.').unwrap_or((method, ""));
    let all: Vec<&'static str> = methods().into_iter().map(|method| method.name).collect();
    let same = |one: &str, other: &str| one.eq_ignore_ascii_case(other);
    let of_name = all.iter().copied().filter(|method| same(part(method).1, name));
    let of_name: Vec<&str> = of_name.collect();
    if !of_name.is_empty() {
        return of_name;
    }
    all.into_iter().filter(|method| same(part(method).0, service)).collect()
}

#[cfg(test)]
mod tests;
