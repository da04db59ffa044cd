//! `Subd.GetFleetResources` and `Subd.TellFleetResources`: the resources that one machine makes for
//! all.

use model::JsonSchema;
use serde::{Deserialize, Serialize};

use super::tasks::PermitReport;
use crate::Done;
use crate::access::Access;
use crate::audit::call_details::CallDetails;
use crate::method::{Effect, Method};
use model::boot_time::BootTime;
use model::object::{Algorithm, ObjectId};
use provisioning::machine::fleet::{FleetNews, FleetStanding, Shared};

/// The longest outputs of a resource that are taken, in bytes.
pub const OUTPUTS_BYTES_MAX: usize = 1 << 20;

/// Returns how the resources of the fleet are that concern the machine.
pub enum GetFleetResources {}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GetFleetResourcesRequest {
    /// The ids of those whose outputs are told.
    pub outputs_of: Vec<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GetFleetResourcesReply {
    /// When this was said. Permits are counted from here.
    pub said_at: BootTime,
    /// By id.
    pub resources: Vec<FleetResourceReport>,
}

/// How a resource of the fleet is, as a machine knows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct FleetResourceReport {
    pub id: String,
    pub permit: PermitReport,
    /// The digest of the inputs that an image of the machine asks for, as
    /// [`provisioning::Resource::key`]; `None` if none asks for it.
    pub asked_key: Option<String>,
    /// True if another resource of the machine needs it.
    pub is_needed: bool,
    /// The number of the permit with which it was made last; zero if that is not known.
    #[serde(with = "model::json::LargeNumber")]
    pub number: u64,
    /// The machine that had that permit; `None` if it was this one.
    pub maker: Option<String>,
    /// What is there; `None` if nothing is.
    pub made: Option<MadeReport>,
    /// True if no image of the fleet has it any more, as the machine was told.
    pub is_unwanted: bool,
}

/// What a machine knows of a resource that is there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct MadeReport {
    /// The digest of its inputs, as [`provisioning::Resource::key`]; `None` while nobody knows how
    /// far its change has come.
    pub key: Option<String>,
    /// The digest of its key and its outputs.
    pub version: ObjectId,
    /// A JSON object, without those that are sensitive; `None` unless it was asked for.
    pub outputs: Option<String>,
}

impl FleetResourceReport {
    /// Returns what is told of a resource; its outputs only if `with_outputs`.
    #[must_use]
    pub fn new(standing: FleetStanding, with_outputs: bool) -> Self {
        let made = standing.shared.map(|Shared { key, outputs }| {
            let outputs = serde_json::Value::Object(outputs).to_string();
            let version = Algorithm::Blake3.digest(format!("{key:?}\0{outputs}").as_bytes());
            MadeReport { key, version, outputs: with_outputs.then_some(outputs) }
        });
        Self {
            id: standing.id,
            permit: PermitReport {
                number: standing.permit.number,
                until: standing.permit.until,
                is_wanted: standing.is_wanted,
                is_live: standing.is_live,
            },
            asked_key: standing.asked_key,
            is_needed: standing.is_needed,
            number: standing.number,
            maker: standing.maker,
            made,
            is_unwanted: standing.is_unwanted,
        }
    }
}

impl Method for GetFleetResources {
    const NAME: &'static str = "Subd.GetFleetResources";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Tells;
    const REPLY_BYTES_MAX: usize = 64 << 20;
    type Request = GetFleetResourcesRequest;
    type Reply = GetFleetResourcesReply;
}

/// Tells a machine what others have made for the fleet, and gives it permits. What is older than
/// what the machine knows, and what comes too late, has no effect. The answer is
/// [`crate::fault::FaultCode::BadRequest`] if outputs cannot be read; all else is taken.
pub enum TellFleetResources {}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TellFleetResourcesRequest {
    /// Taken first.
    pub news: Vec<FleetResourceNews>,
    pub permits: Vec<PermitResource>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct FleetResourceNews {
    pub id: String,
    /// The number of the permit of the maker; zero if only what follows `made` is told.
    #[serde(with = "model::json::LargeNumber")]
    pub number: u64,
    /// The host name of the machine that made or removed it last.
    pub maker: String,
    pub made: Option<SharedResource>,
    /// True if no image of the fleet has it any more.
    pub is_unwanted: bool,
}

impl TryFrom<FleetResourceNews> for FleetNews {
    type Error = String;

    fn try_from(news: FleetResourceNews) -> Result<Self, String> {
        let FleetResourceNews { id, number, maker, made, is_unwanted } = news;
        let read = |SharedResource { key, outputs }: SharedResource| {
            if outputs.len() > OUTPUTS_BYTES_MAX {
                let most = OUTPUTS_BYTES_MAX;
                return Err(format!("the outputs of `{id}` have more than {most} bytes"));
            }
            let outputs = serde_json::from_str(&outputs);
            let outputs = outputs.map_err(|error| format!("the outputs of `{id}`: {error}"))?;
            Ok(Shared { key, outputs })
        };
        let shared = made.map(read).transpose()?;
        Ok(Self { id, number, maker, shared, is_unwanted })
    }
}

/// What the maker has made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SharedResource {
    /// As in [`MadeReport`].
    pub key: Option<String>,
    /// A JSON object.
    pub outputs: String,
}

/// Permits the machine to make and remove a resource of the fleet until a moment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PermitResource {
    pub id: String,
    /// Grows with each machine that gets the permit.
    #[serde(with = "model::json::LargeNumber")]
    pub number: u64,
    /// When no plugin may work on it any more.
    pub until: BootTime,
}

impl Method for TellFleetResources {
    const NAME: &'static str = "Subd.TellFleetResources";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Changes;
    const REQUEST_BYTES_MAX: usize = 64 << 20;
    type Request = TellFleetResourcesRequest;
    type Reply = Done;

    fn audit_details(request: &Self::Request) -> CallDetails {
        let ids = |ids: Vec<&str>| ids.join(" ");
        CallDetails::default()
            .with("resources", ids(request.news.iter().map(|news| news.id.as_str()).collect()))
            .with("permits", ids(request.permits.iter().map(|one| one.id.as_str()).collect()))
    }
}
