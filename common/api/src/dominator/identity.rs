//! What operators say of machines that may be other machines than those that are meant.

use serde::{Deserialize, Serialize};

use crate::Done;
use crate::audit::brief::Brief;
use crate::{
    access::Access,
    method::{Effect, Method},
};

/// Says that what answers for a machine that is `wrong-machine` is the machine that is meant: it
/// was installed anew, or shares its name or machine id with others for a reason.
pub enum Trust {}

/// See [`Trust`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrustRequest {
    /// The machine, by its name in the machine database.
    pub hostname: String,
    /// Why; must not be empty.
    pub why: String,
    /// Who says so, as long as no certificate tells.
    pub who: String,
}

impl Method for Trust {
    const NAME: &'static str = "Dominator.Trust";
    const ACCESS: Access = Access::PowerOrOwner;
    const EFFECT: Effect = Effect::Changes;
    type Request = TrustRequest;
    type Reply = Done;

    fn brief(request: &Self::Request) -> Brief {
        Brief::default().with("host", &request.hostname).why(&request.why).who(&request.who)
    }
}
