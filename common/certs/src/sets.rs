//! Sets of powers: the methods that each role calls, and no more.
//!
//! A set lists also those methods of its role that any certificate may call, so that certificates
//! stay sufficient if the rule of a method becomes stricter. No set has a method that gives its
//! holder more than the role has anyway.
// tidy: core

use api::access::identity::MACHINE_METHODS;
use api::access::{Access, IdentityKind, Powers};
use api::certificate::is_pattern;
use api::methods;

/// The powers of a role.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Set {
    /// A dominator: drives subs, reads images, follows an mdbd
    Dominator,
    /// An imageserver, which may follow another one and send changes to it
    Imageserver,
    /// A sub: gets objects
    Subd,
    /// An mdbd: calls no daemon
    Mdbd,
    /// A filegen-server: calls no daemon
    FilegenServer,
    /// A person who gives the dominator orders and reads everything except files of machines
    Operator,
    /// A person or build system that adds images to any directory
    Uploader,
    /// Like uploader, but only into directories that the holder or one of its groups owns
    Contributor,
    /// A person who reads and changes nothing
    Viewer,
}

/// Methods for reading images.
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

/// Methods for reading the state of machines, except their files.
const MACHINES: &[&str] = &[
    "MdbServer.GetMdb",
    "Subd.GetConfiguration",
    "Subd.GetDirectories",
    "Subd.GetDirectoryBlocks",
    "Subd.GetFleetResources",
    "Subd.GetLimits",
    "Subd.GetRefusedChanges",
    "Subd.GetResources",
    "Subd.GetTaskStates",
    "Subd.GetTasks",
    "Subd.Poll",
];

/// Methods for reading what a filegen-server makes, except secrets.
const COMPUTED: &[&str] =
    &["FileGenerator.Generate", "FileGenerator.GetContents", "FileGenerator.GetGenerators"];

/// Methods for reading the state of a dominator.
const FLEET: &[&str] = &[
    "Dominator.CheckMdb",
    "Dominator.CountKeptFiles",
    "Dominator.Explain",
    "Dominator.GetConfiguration",
    "Dominator.GetResources",
    "Dominator.GetStatus",
    "Dominator.GetSubLimits",
    "Dominator.GetTask",
    "Dominator.ListDeparting",
    "Dominator.ListEnvironments",
    "Dominator.ListEvents",
    "Dominator.ListPermits",
    "Dominator.ListRollouts",
    "Dominator.ListSubs",
    "Dominator.ListTasks",
    "Dominator.PlanMachine",
    "Dominator.PlanMachines",
    "Dominator.PlanRollout",
    "Dominator.ShowMdb",
    "Dominator.ShowSub",
    "Dominator.WatchSub",
];

/// What a dominator calls.
const DOMINATOR: &[&str] = &[
    "FileGenerator.Generate",
    "FileGenerator.GetContents",
    "FileGenerator.GetGenerators",
    "FileGenerator.GetSecrets",
    "FileGenerator.OrderRevision",
    "FileGenerator.SignContents",
    "ImageServer.GetImage",
    // It plans for machines of private images, and so reads them.
    "ImageServer.GetPrivateDirectories",
    "ImageServer.HoldImages",
    "MdbServer.GetMdb",
    "ObjectServer.GetObjects",
    "Subd.AddObjects",
    "Subd.Cleanup",
    "Subd.Commit",
    "Subd.ContinueProvisioning",
    "Subd.CountOwners",
    "Subd.Fetch",
    "Subd.GetDirectories",
    "Subd.GetDirectoryBlocks",
    "Subd.GetFleetResources",
    "Subd.GetLimits",
    "Subd.GetRefusedChanges",
    "Subd.GetResources",
    "Subd.GetTaskLog",
    "Subd.GetTaskStates",
    "Subd.GetTasks",
    "Subd.GiveUpProvisioning",
    "Subd.HoldMachine",
    "Subd.Hurry",
    "Subd.OfferContents",
    "Subd.OfferImage",
    "Subd.OrderResource",
    "Subd.OrderTask",
    "Subd.PermitTask",
    "Subd.PlanResources",
    "Subd.Poll",
    "Subd.Prepare",
    "Subd.PreviewScan",
    "Subd.Provision",
    "Subd.ReplaceCertificate",
    "Subd.RetryTriggers",
    "Subd.ScanNow",
    "Subd.SetConfiguration",
    "Subd.SetNotRestarted",
    "Subd.TellFleetResources",
];

impl Set {
    /// Returns the name on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Dominator => "dominator",
            Self::Imageserver => "imageserver",
            Self::Subd => "subd",
            Self::Mdbd => "mdbd",
            Self::FilegenServer => "filegen-server",
            Self::Operator => "operator",
            Self::Uploader => "uploader",
            Self::Contributor => "contributor",
            Self::Viewer => "viewer",
        }
    }

    /// Returns what a holder of the role is.
    #[must_use]
    pub fn kind(self) -> IdentityKind {
        match self {
            Self::Subd => IdentityKind::Machine,
            Self::Dominator | Self::Imageserver | Self::Mdbd | Self::FilegenServer => {
                IdentityKind::Service
            }
            Self::Operator | Self::Uploader | Self::Contributor | Self::Viewer => {
                IdentityKind::User
            }
        }
    }

    /// Returns the patterns of the methods that the role calls.
    #[must_use]
    pub fn powers(self) -> Vec<String> {
        let lists: &[&[&str]] = match self {
            Self::Dominator => &[DOMINATOR],
            Self::Imageserver => &[&[
                "ImageServer.Forward",
                "ImageServer.GetImage",
                "ImageServer.GetImageUpdates",
                "ImageServer.GetMadeDirectories",
                "ObjectServer.AddObjects",
                "ObjectServer.CheckObjects",
                "ObjectServer.GetObjects",
            ]],
            Self::Subd => &[MACHINE_METHODS],
            Self::Mdbd | Self::FilegenServer => &[],
            // An operator can pause and scan a machine by hand while no dominator runs. Files of
            // machines are left out because they may have secrets of other teams.
            Self::Operator => {
                let orders: &[&str] = &[
                    "Dominator.*",
                    "FileGenerator.Load",
                    "FileGenerator.OrderRevision",
                    "FileGenerator.RenewCertificates",
                    "Subd.ForgetIssued",
                    "Subd.OrderResource",
                    "Subd.OrderTask",
                    "Subd.Pause",
                    "Subd.PreviewScan",
                    "Subd.Resume",
                    "Subd.ScanNow",
                    "Subd.TakeOver",
                ];
                &[orders, IMAGES, MACHINES, COMPUTED]
            }
            Self::Uploader => &[&["ImageServer.AddImage", "ObjectServer.AddObjects"], IMAGES],
            Self::Contributor => &[&["ObjectServer.AddObjects"], IMAGES],
            Self::Viewer => &[IMAGES, MACHINES, FLEET, COMPUTED],
        };
        let mut powers: Vec<&str> = lists.concat();
        powers.sort_unstable();
        powers.into_iter().map(str::to_owned).collect()
    }
}

/// A pattern without effect.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PatternError {
    #[error(
        "`{pattern}` is not a pattern of methods: write Service.Method, with * for any letters, \
         such as 'Dominator.*', or '*' for everything"
    )]
    Form { pattern: String },
    #[error("`{pattern}` matches no method{}", suggestion(.similar))]
    NoMatch { pattern: String, similar: Vec<&'static str> },
}

fn suggestion(similar: &[&str]) -> String {
    if similar.is_empty() { String::new() } else { format!("; there are {}", similar.join(", ")) }
}

/// Parses a pattern of methods as operators write it: `*` stands for everything.
///
/// # Errors
///
/// [`PatternError`] if it matches no method.
pub fn parse_pattern(text: &str) -> Result<String, PatternError> {
    if text == "*" {
        return Ok("*.*".to_owned());
    }
    if !is_pattern(text) {
        return Err(PatternError::Form { pattern: model::escape::escape(text.as_bytes()) });
    }
    if allowed([text]).is_empty() {
        return Err(PatternError::NoMatch { pattern: text.to_owned(), similar: similar(text) });
    }
    Ok(text.to_owned())
}

/// Returns the methods that `patterns` match, sorted by name, including reserved ones.
#[must_use]
pub fn allowed<Text: Into<String>>(patterns: impl IntoIterator<Item = Text>) -> Vec<&'static str> {
    let powers = Powers::new(patterns);
    methods().into_iter().map(|method| method.name).filter(|name| powers.has(name)).collect()
}

/// Returns the methods that any certificate may call, sorted by name.
#[must_use]
pub fn allowed_to_all() -> Vec<&'static str> {
    let open = methods().into_iter().filter(|method| method.access == Access::Authenticated);
    open.map(|method| method.name).collect()
}

/// Returns methods similar to `text`: those of the same name, or else all of its service.
fn similar(text: &str) -> Vec<&'static str> {
    let Some((service, name)) = text.split_once('.') else { return Vec::new() };
    let part = |method: &'static str| method.split_once('.').unwrap_or((method, ""));
    let all: Vec<&'static str> = methods().into_iter().map(|method| method.name).collect();
    let same = |one: &str, other: &str| one.eq_ignore_ascii_case(other);
    let namesakes = all.iter().copied().filter(|method| same(part(method).1, name));
    let namesakes: Vec<&str> = namesakes.collect();
    if !namesakes.is_empty() {
        return namesakes;
    }
    all.into_iter().filter(|method| same(part(method).0, service)).collect()
}

#[cfg(test)]
mod tests;
