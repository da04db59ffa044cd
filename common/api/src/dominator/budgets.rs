//! What operators are told about budgets and stopped images, and how they let an image go on.

use serde::{Deserialize, Serialize};

use crate::Done;
use crate::audit::brief::Brief;
use crate::{
    access::Access,
    method::{Effect, Method},
};
use model::image::ImageName;
use model::tree::Time;

/// One limit, and what is taken of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LimitUse {
    /// The flag that says so, such as `--max-updating nyc=10%`.
    pub limit: String,
    /// How many machines may be under way at once.
    pub places: u32,
    /// How many of these places are for repairs alone; 0 if there is one place for all.
    pub for_repairs: u32,
    /// Repairs under way.
    pub repairs: u32,
    /// Rollouts under way.
    pub rollouts: u32,
    /// Machines that wait and are counted by this limit.
    pub waiting: u32,
}

/// An image to which updates have stopped, because they failed too often.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoppedImage {
    /// Its name.
    pub image: ImageName,
    /// How often they failed, in words.
    pub why: String,
    /// Since when.
    pub since: Time,
}

/// What is under way, what waits, and what has stopped.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BudgetReport {
    /// Machines that are being updated, or may be.
    pub under_way: u32,
    /// Machines that wait for their turn to be updated.
    pub waiting: u32,
    /// Machines that wait for their share of the network.
    pub fetches_waiting: u32,
    /// What they will fetch, in bytes.
    #[serde(with = "model::wide")]
    pub bytes_waiting: u64,
    /// The limits that have counted machines, those first that most machines wait for; at most a
    /// hundred.
    pub limits: Vec<LimitUse>,
    /// The images to which updates have stopped, by name.
    pub stopped: Vec<StoppedImage>,
}

/// Lets updates to an image go on that have stopped by themselves; counting begins anew.
pub enum ResumeImage {}

/// See [`ResumeImage`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResumeImageRequest {
    /// The image.
    pub image: ImageName,
    /// Why; must not be empty.
    pub why: String,
    /// Who says so, as long as no certificate tells.
    pub who: String,
}

impl Method for ResumeImage {
    const NAME: &'static str = "Dominator.ResumeImage";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Changes;
    type Request = ResumeImageRequest;
    type Reply = Done;

    fn brief(request: &Self::Request) -> Brief {
        Brief::default().with("image", &request.image).why(&request.why).who(&request.who)
    }
}
