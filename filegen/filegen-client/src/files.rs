//! Records of machines, and what a filegen-server makes for them.

use std::time::Duration;

use api::dominator::mdb::{ShowMdb, ShowMdbRequest};
use api::file_generator::{FILES_MAX, Generate, GenerateRequest, GeneratedFile, WantedFiles};
use daemon::DOMINATOR_PORT;
use daemon::mdb_file::read;
use model::mdb::Machine;
use model::object::Algorithm;
use model::path::TreePath;
use rpc::client::Client;

use super::{Servers, ToolError};

/// Time limit for an answer. A filegen-server waits 20 s for programs and web servers.
pub const LIMIT: Duration = Duration::from_secs(60);

/// Returns how many machines are in one request for so many files of each.
pub fn batch(paths: usize) -> usize {
    (FILES_MAX / paths.max(1)).clamp(1, 500)
}

/// Returns all machines of the file that was named, or of the dominator.
pub async fn machines(servers: &Servers) -> Result<Vec<Machine>, ToolError> {
    let machines: Vec<Machine> = match &servers.arguments.mdb {
        Some(file) => read(file)?.machines.into_values().collect(),
        None => {
            let client = servers.client(&servers.arguments.dominator, DOMINATOR_PORT)?;
            let request = ShowMdbRequest { held: false };
            client.call_within::<ShowMdb>(&request, LIMIT).await?.machines
        }
    };
    if machines.is_empty() { Err(ToolError::Empty) } else { Ok(machines) }
}

/// Makes a request for the same files of some machines.
pub fn request<'a>(
    machines: impl IntoIterator<Item = &'a Machine>,
    algorithm: Algorithm,
    paths: &[TreePath],
) -> GenerateRequest {
    let wanted = |machine: &Machine| WantedFiles {
        machine: machine.clone(),
        algorithm,
        paths: paths.to_vec(),
        key: None,
        outputs: String::new(),
    };
    GenerateRequest { machines: machines.into_iter().map(wanted).collect(), is_for_use: false }
}

/// Has files made: for each machine of the request all of its paths.
pub async fn generate(
    client: &Client,
    request: &GenerateRequest,
) -> Result<Vec<Vec<GeneratedFile>>, ToolError> {
    let reply = client.call_within::<Generate>(request, LIMIT).await?;
    let made = reply.machines.iter().map(Vec::len);
    if made.eq(request.machines.iter().map(|wanted| wanted.paths.len())) {
        Ok(reply.machines)
    } else {
        Err(ToolError::Answer { peer: client.peer().authority() })
    }
}
