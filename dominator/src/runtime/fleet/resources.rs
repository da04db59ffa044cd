//! Asks machines for their resources. Callers are served one at a time.

use std::time::Duration;

use api::dominator::resources::{GetResourcesReply, MachineResources};
use api::fault::FaultCode;
use api::subd::{GetResources, GetResourcesRequest, ResourcesReport};
use futures_util::StreamExt as _;
use futures_util::stream;
use model::display::error_chain;

use super::Fleet;
use crate::core::selectors::Selection;
use crate::runtime::driver::client_of;

/// How long a machine may take to answer.
const CALL_LIMIT: Duration = Duration::from_secs(5);

/// How many machines are asked at the same time.
const ASKED_MAX: usize = 64;

impl Fleet {
    /// Asks the machines of `selection` for their resources. Those without any are left out. Of
    /// machines that have left the machine database it has what they have told last, as orphans.
    pub async fn resources(&self, selection: &Selection) -> GetResourcesReply {
        let _turn = self.counting.lock().await;
        let hostnames = self.list(selection).into_iter().map(|sub| sub.hostname);
        let asked = hostnames.map(async |hostname| {
            let (report, unknown) = match self.resources_of(&hostname).await {
                Ok(report) => (Some(report?), None),
                Err(why) => (None, Some(why)),
            };
            Some(MachineResources { hostname, report, unknown })
        });
        let answers = stream::iter(asked).buffered(ASKED_MAX);
        let mut machines: Vec<_> = answers.filter_map(async |answer| answer).collect().await;
        machines.extend(self.departed_resources(selection));
        machines.sort_by(|one, other| one.hostname.cmp(&other.hostname));
        GetResourcesReply { machines }
    }

    /// Returns the resources of a machine; `None` if it has none. The error says why that is not
    /// known.
    async fn resources_of(&self, hostname: &str) -> Result<Option<ResourcesReport>, String> {
        let (handle, machine) = self.find(hostname).map_err(|error| error.to_string())?;
        handle.with_sub(|sub| sub.expect_right_machine())?;
        let client = client_of(&machine, &self.shared);
        let request = GetResourcesRequest::default();
        match client.call_within::<GetResources>(&request, CALL_LIMIT).await {
            Ok(reply) => Ok(reply
                .report
                .filter(|report| !report.resources.is_empty() || report.provisioning.is_some())),
            Err(error) if error.code() == Some(FaultCode::NoMethod) => Ok(None),
            Err(error) => Err(error_chain(&error)),
        }
    }
}
