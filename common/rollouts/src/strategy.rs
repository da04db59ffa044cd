//! What operators say about how machines are changed, and who must say yes.

use std::collections::{BTreeMap, BTreeSet};

use model::JsonSchema;
use model::image::ImageName;
use model::json::KeyError;
use serde::{Deserialize, Serialize};

use crate::window::Window;

/// How machines are changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Strategy {
    pub method: Method,
    /// So many of the machines stay healthy, in percent.
    pub min_healthy_percent: u8,
    /// So many may be changed where the percentage leaves room for none.
    pub min_batch: usize,
    /// So many are changed first; 0 for none; if it is left out: one in a thousand, at least one.
    pub canary: Option<usize>,
    /// Machines that were changed are healthy for so long before the next ones are changed, in
    /// seconds.
    pub soak_s: u64,
    /// A step that takes longer fails, in seconds; 0 for no limit. Time outside of windows does not
    /// count.
    pub timeout_s: u64,
    /// Machines are changed in these windows only; without any: at all times.
    pub windows: Vec<Window>,
    /// A step takes at least so long, in seconds: its machines are changed evenly over that time.
    pub min_duration_s: u64,
    /// An image is taken when it was uploaded so long ago, in seconds.
    pub min_image_age_s: u64,
    /// Only machines with one of these images, or without an image, may get the new one; without
    /// any: all.
    pub requires_from: BTreeSet<ImageName>,
    /// What the analysis is told, by name. If it is there, the analysis is asked whether the step
    /// goes on each time that the changed machines have been healthy for long enough.
    pub analysis: Option<BTreeMap<String, String>>,
}

/// In which order versions of a task change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Method {
    #[default]
    StopThenStart,
    StartThenStop,
}

impl Default for Strategy {
    fn default() -> Self {
        Self {
            method: Method::default(),
            min_healthy_percent: 80,
            min_batch: 1,
            canary: None,
            soak_s: 0,
            timeout_s: 0,
            windows: Vec::new(),
            min_duration_s: 0,
            min_image_age_s: 0,
            requires_from: BTreeSet::new(),
            analysis: None,
        }
    }
}

/// Who must say yes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Approval {
    pub voters: BTreeSet<String>,
    /// 0: no votes are needed.
    pub min_approvals: usize,
    /// 0: votes do not reject.
    pub min_rejections: usize,
    /// Whether the author of a revision may be its only approver.
    pub author_alone: bool,
    /// Whether a step back needs votes too.
    pub rollback: RollbackApproval,
    /// A step that waits longer for votes counts as rejected, in seconds.
    pub timeout_s: u64,
}

/// Whether a step back needs votes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RollbackApproval {
    #[default]
    Auto,
    Same,
}

impl Default for Approval {
    fn default() -> Self {
        Self {
            voters: BTreeSet::new(),
            min_approvals: 0,
            min_rejections: 1,
            author_alone: false,
            rollback: RollbackApproval::Auto,
            timeout_s: 7 * 24 * 3_600,
        }
    }
}

pub(crate) fn check_strategy(at: &str, strategy: &Strategy) -> Result<(), KeyError> {
    let percent = strategy.min_healthy_percent;
    let at = |key: &str| format!("{at}.strategy.{key}");
    if strategy.method == Method::StartThenStop {
        let problem = "start_then_stop would run two versions of a task at once, \
                       use stop_then_start";
        return Err(KeyError::new(&at("method"), problem));
    }
    if percent >= 100 {
        let problem = format!("{percent} leaves no machine that could be changed, use at most 99");
        return Err(KeyError::new(&at("min_healthy_percent"), problem));
    }
    if (1..=strategy.min_duration_s).contains(&strategy.timeout_s) {
        let problem = format!("{} leaves no time after min_duration_s", strategy.timeout_s);
        return Err(KeyError::new(&at("timeout_s"), problem));
    }
    let mut windows = strategy.windows.iter().enumerate();
    windows.try_for_each(|(index, window)| window.check(&at(&format!("windows[{index}]"))))
}

pub(crate) fn check_approval(at: &str, approval: Option<&Approval>) -> Result<(), KeyError> {
    let Some(approval) = approval else { return Ok(()) };
    let voters = approval.voters.len();
    let minima =
        [("min_approvals", approval.min_approvals), ("min_rejections", approval.min_rejections)];
    for (key, minimum) in minima {
        let may_be_more = key == "min_rejections" && minimum <= 1;
        if minimum > voters && !may_be_more {
            let problem = format!("is {minimum}, and there are {voters} voters");
            return Err(KeyError::new(&format!("{at}.approval.{key}"), problem));
        }
    }
    Ok(())
}
