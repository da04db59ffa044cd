//! What can go wrong when one machine is looked at, or brought up to date, by hand.

use std::io;
use std::path::PathBuf;

use api::fault::FaultCode;
use api::planning::PlanError;
use api::subd::{FetchFailure, Outcome};
use daemon::{EXIT_FAILED, EXIT_MISUSE};
use model::filter::PatternError;
use model::image::ImageName;
use model::path::TreePath;
use rpc::client::{CallError, PeerError};
use rpc::trees::ReadError;
use rpc::trees::image::GetImageError;

/// Why subtool failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ToolError {
    #[error("{0}")]
    Misuse(String),
    #[error("bad address")]
    Address {
        #[from]
        source: PeerError,
    },
    #[error(transparent)]
    Call {
        #[from]
        source: CallError,
    },
    #[error(transparent)]
    Image {
        #[from]
        source: GetImageError,
    },
    #[error("the tree of the machine cannot be read")]
    Tree {
        #[from]
        source: ReadError,
    },
    #[error("the machine has exclusions that cannot be understood")]
    Exclusions {
        #[from]
        source: PatternError,
    },
    #[error("no plan can be made")]
    Plan {
        #[from]
        source: PlanError,
    },
    #[error("gave up after {seconds} s: {what}")]
    TooLong {
        /// How long was waited, in seconds.
        seconds: u64,
        what: String,
    },
    #[error("the machine does not scan as {image} asks, so the two cannot be compared")]
    OtherScope { image: ImageName },
    #[error("the update is blocked: {}", .0.join("; "))]
    Blocked(Vec<String>),
    #[error("the update is unsafe: {}", .0.join("; "))]
    Unsafe(Vec<String>),
    #[error("the machine cannot get the objects: {}", fetch_failure(.0))]
    Fetch(FetchFailure),
    #[error("the update {}", outcome(.0))]
    Update(Outcome),
    #[error("the machine still differs after {rounds} updates: {paths}")]
    NotConverging {
        rounds: u32,
        /// Some of the paths that differ.
        paths: String,
    },
    #[error("there is no image that the machine was updated to")]
    NoImage,
    #[error("the health check failed: {0}")]
    Unhealthy(String),
    #[error("{0}")]
    Refused(String),
    #[error("{path} was changed again and again while it was read")]
    Changing { path: TreePath },
    #[error("cannot write `{}`", path.display())]
    Write { path: PathBuf, source: io::Error },
}

fn fetch_failure(failure: &FetchFailure) -> String {
    match failure {
        FetchFailure::InsufficientSpace { need_bytes, free_bytes } => {
            format!("it needs {need_bytes} bytes and has {free_bytes} free")
        }
        FetchFailure::Sources(why) | FetchFailure::Local(why) => why.clone(),
        FetchFailure::GaveWay => "it gave way to another fetch".to_owned(),
    }
}

fn outcome(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Done => "was carried out".to_owned(),
        Outcome::NotPrepared(why) => format!("cannot be staged, and nothing was changed: {why}"),
        Outcome::RolledBack(why) => format!("failed, and all was put back: {why}"),
        Outcome::Stuck(why) => format!("failed, and the tree is mixed: {why}"),
        Outcome::Undone(why) => {
            format!("was put back, because the health check failed: {why}")
        }
    }
}

impl ToolError {
    /// The exit code that goes with it.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Misuse(_) | Self::Address { .. } => EXIT_MISUSE,
            _ => EXIT_FAILED,
        }
    }

    /// What the operator can do.
    pub fn hints(&self) -> Vec<&'static str> {
        match self {
            Self::Address { .. } => vec!["an address is HOST or HOST:PORT"],
            Self::Call { source: CallError::Connect { .. } } => {
                vec!["is subd running there? say where: --subd HOST:PORT, or DOMINATOR_SUBD"]
            }
            Self::Call { source } => match source.code() {
                Some(FaultCode::Held) => {
                    vec!["subtool poll shows the pause; subtool resume ends it"]
                }
                Some(FaultCode::Busy) => {
                    vec!["another update or fetch is under way; is a dominator at work?"]
                }
                _ => Vec::new(),
            },
            Self::Image { source: GetImageError::Call { .. } } => {
                vec!["is the imageserver running? say where: --imageserver HOST:PORT"]
            }
            Self::Image { source: GetImageError::NotThere { .. } } => {
                vec!["imagetool list shows the images that there are"]
            }
            Self::OtherScope { .. } => {
                vec!["--rescan tells it to scan so; no file of it is changed by that"]
            }
            Self::Unsafe(_) => {
                vec![
                    "look at it with subtool show-update; if it is meant: --force-unsafe",
                    "if the image is wrong, push another one",
                ]
            }
            Self::Fetch(FetchFailure::Sources(_)) => {
                vec!["the machine must reach the object server: --source HOST:PORT as it sees it"]
            }
            Self::NoImage => vec!["subtool cleanup --all removes all objects"],
            Self::NotConverging { .. } => vec!["does something on the machine undo the update?"],
            _ => Vec::new(),
        }
    }
}
