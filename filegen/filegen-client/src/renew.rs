//! `filegen-client renew`: has certificates of machines made anew before their time.

use std::collections::BTreeSet;

use api::file_generator::{RenewCertificates, RenewCertificatesReply, RenewCertificatesRequest};
use daemon::{EXIT_DONE, EXIT_PARTLY};
use model::display::counted;
use rpc::client::Client;
use tool::{Format, Output};

use super::ToolError;

/// Asks for other certificates of these machines; `None` for all.
pub async fn run(
    client: &Client,
    format: Format,
    hostnames: Option<Vec<String>>,
    why: String,
) -> Result<Output, ToolError> {
    let asked = hostnames.clone().unwrap_or_default();
    let request = RenewCertificatesRequest { hostnames, why };
    let reply = client.call::<RenewCertificates>(&request).await?;
    let renewed: BTreeSet<&String> = reply.hostnames.iter().collect();
    let without = asked.iter().filter(|hostname| !renewed.contains(hostname));
    let without: Vec<&str> = without.map(String::as_str).collect();
    if !without.is_empty() {
        eprintln!("warning: no certificates were made for {}", without.join(", "));
    }
    let code = if without.is_empty() { EXIT_DONE } else { EXIT_PARTLY };
    let text = format.render(&reply, |RenewCertificatesReply { hostnames }| {
        let machines = counted(hostnames.len() as u64, "machine");
        format!(
            "The certificates of {machines} are made anew when their dominator asks for them.\n"
        )
    });
    Ok(Output { text, code })
}
