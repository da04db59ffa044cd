//! `filegen-client list`, `get` and `load`.

use std::io::Write as _;

use api::file_generator::{
    ComputedContent, GeneratedContent, GeneratedFile, Generators, GetContents, GetContentsRequest,
    GetGenerators, GetGeneratorsRequest, GetSecrets, GetSecretsRequest, Load, LoadRequest,
};
use comfy_table::{Table, presets};
use daemon::{EXIT_DONE, EXIT_PARTLY};
use model::escape::ByteText;
use model::mdb::Machine;
use model::object::{Algorithm, ObjectId};
use model::path::TreePath;
use rpc::client::Client;
use serde::Serialize;
use tool::{Format, Output};

use super::files::{LIMIT, generate, machines, request};
use super::{SERVER, Servers, ToolError};

/// Digits of a version that a table shows.
const DIGITS: usize = 12;

/// Lists generators.
pub async fn list(client: &Client, format: Format) -> Result<Output, ToolError> {
    let generators = generators(client).await?;
    let code = if generators.error.is_empty() { EXIT_DONE } else { EXIT_PARTLY };
    if code == EXIT_PARTLY && format == Format::Table {
        let error = model::display::safe_lines(&generators.error);
        eprintln!("warning: the newest configuration is not in force: {error}");
    }
    for order in generators.orders.iter().filter(|_| format == Format::Table) {
        if let Some(why) = &order.stopped {
            let why = model::display::safe_lines(why);
            eprintln!("warning: content revision {} has stopped: {why}", order.revision);
        }
    }
    let text = format.render(&generators, |generators| {
        let mut table = Table::new();
        table.load_style(presets::NOTHING);
        table.set_header(["PATH", "KIND", "SECRET", "REVISION", "VERSION"]);
        for generator in &generators.generators {
            table.add_row([
                generator.path.to_string(),
                generator.kind.clone(),
                if generator.is_secret { "yes" } else { "" }.to_owned(),
                generator.revision.to_string(),
                generator.version.hex()[..DIGITS].to_owned(),
            ]);
        }
        let signer =
            generators.signer.as_ref().map(|line| format!("\nContents are signed by {line}\n"));
        format!("{}\n{}", table.trim_fmt(), signer.unwrap_or_default())
    });
    Ok(Output { text, code })
}

/// Has the server take its files as they are now.
pub async fn load(client: &Client, format: Format, why: String) -> Result<Output, ToolError> {
    let reply = client.call_within::<Load>(&LoadRequest { why }, LIMIT).await?;
    let code = if reply.error.is_empty() { EXIT_DONE } else { EXIT_PARTLY };
    if code == EXIT_PARTLY && format == Format::Table {
        let error = model::display::safe_lines(&reply.error);
        eprintln!("warning: the newest configuration is not in force: {error}");
    }
    let text = format
        .render(&reply, |reply| format!("Content revision {} is in force.\n", reply.revision));
    Ok(Output { text, code })
}

/// Returns the generators of a server.
pub async fn generators(client: &Client) -> Result<Generators, ToolError> {
    let request = GetGeneratorsRequest::default();
    let reply = client.call_within::<GetGenerators>(&request, LIMIT).await?;
    reply.generators.ok_or_else(|| ToolError::Answer { peer: client.peer().authority() })
}

/// A file in JSON.
#[derive(Serialize)]
struct ShownFile<'a> {
    hostname: &'a str,
    path: &'a TreePath,
    id: ObjectId,
    #[serde(with = "model::json::LargeNumber")]
    valid_until_seconds: u64,
    is_secret: bool,
    bytes: &'a ByteText,
}

/// Prints a file of a machine.
pub async fn get(servers: &Servers, hostname: &str, path: &TreePath) -> Result<Output, ToolError> {
    let all = machines(servers).await?;
    let machine = all.into_iter().find(|machine| machine.hostname == hostname);
    let machine = machine.ok_or_else(|| ToolError::NoMachine { hostname: hostname.to_owned() })?;
    let client = servers.generator(SERVER)?;
    let (made, content) = file(&client, &machine, path).await?;
    match servers.arguments.format {
        Format::Json => {
            let GeneratedContent { id, valid_until_seconds, is_secret, .. } = made;
            let bytes = &content.bytes;
            Ok(tool::json(&ShownFile { hostname, path, id, valid_until_seconds, is_secret, bytes })
                .into())
        }
        // The content may be binary.
        Format::Table => match std::io::stdout().write_all(&content.bytes.0) {
            Err(source) if source.kind() != std::io::ErrorKind::BrokenPipe => {
                Err(ToolError::Print { source })
            }
            _ => Ok(String::new().into()),
        },
    }
}

async fn file(
    client: &Client,
    machine: &Machine,
    path: &TreePath,
) -> Result<(GeneratedContent, ComputedContent), ToolError> {
    let (hostname, path) = (machine.hostname.clone(), path.clone());
    let request = request([machine], Algorithm::Blake3, std::slice::from_ref(&path));
    let made = match generate(client, &request).await?.pop().and_then(|mut files| files.pop()) {
        Some(GeneratedFile::Made(made)) => made,
        Some(GeneratedFile::Failed(why)) => {
            return Err(ToolError::NotMade { hostname, path, why });
        }
        None => return Err(ToolError::Answer { peer: client.peer().authority() }),
    };
    let ids = vec![made.id];
    let mut reply = if made.is_secret {
        let request = GetSecretsRequest { ids, hostnames: vec![hostname.clone()] };
        client.call_within::<GetSecrets>(&request, LIMIT).await?
    } else {
        client.call_within::<GetContents>(&GetContentsRequest { ids }, LIMIT).await?
    };
    let content = reply.contents.pop().ok_or(ToolError::Gone { hostname, path })?;
    if Algorithm::Blake3.digest(&content.bytes.0) != made.id {
        return Err(ToolError::Digest { peer: client.peer().authority() });
    }
    Ok((made, content))
}
