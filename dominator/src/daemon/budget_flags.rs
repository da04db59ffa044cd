//! Flags that limit how much may be under way at once, and stop updates to an image.

use std::str::FromStr;

use rpc::client::{Peer, PeerError};

use crate::core::budget::limits::{LocationLimit, MachineLimit, MachineLimitError, MachineLimits};
use crate::core::claims::ClaimSettings;
use crate::core::image_breaker::FailureLimits;
use crate::core::sources::Sources;

/// The limit of high impact if none is given.
const HIGH_IMPACT: MachineLimit = MachineLimit::Percent(10);

/// A limit, or `none`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GivenLimit(pub Option<MachineLimit>);

impl FromStr for GivenLimit {
    type Err = MachineLimitError;

    fn from_str(text: &str) -> Result<Self, MachineLimitError> {
        MachineLimit::parse(text).map(Self)
    }
}

#[derive(Clone, Debug, clap::Args)]
pub struct BudgetArgs {
    /// How many machines may be updating at once: a number, PERCENT%, or none (the default). With a
    /// LOCATION it holds for the machines there and below. May be given several times
    #[arg(long, value_name = "[LOCATION=]LIMIT")]
    pub max_updating: Vec<LocationLimit>,

    /// How many machines of any one location may be updating at once
    #[arg(long, value_name = "LIMIT")]
    pub max_updating_per_location: Option<GivenLimit>,

    /// How many machines may be rebooting or under other work of high impact at once, as above;
    /// 10% if not given
    #[arg(long, value_name = "[LOCATION=]LIMIT")]
    pub max_high_impact: Vec<LocationLimit>,

    /// How many machines of any one location may be under work of high impact at once
    #[arg(long, value_name = "LIMIT")]
    pub max_high_impact_per_location: Option<GivenLimit>,

    /// How much all machines together are told to fetch, in bytes per second; no limit if not given
    #[arg(long, value_name = "BYTES",
          value_parser = clap::value_parser!(u64).range(1_000..))]
    pub network_limit: Option<u64>,

    /// Stop updates to an image when more than PERCENT of the machines that were updated to it have
    /// failed
    #[arg(long, value_name = "PERCENT", default_value_t = 10,
          value_parser = clap::value_parser!(u8).range(..=100))]
    pub image_failure_max: u8,

    /// Stop updates to an image when more than PERCENT of the machines that should get it are
    /// blocked
    #[arg(long, value_name = "PERCENT", default_value_t = 10,
          value_parser = clap::value_parser!(u8).range(..=100))]
    pub blocked_percent: u8,

    /// Do not stop updates to an image before so many machines have failed, or are blocked
    #[arg(long, value_name = "COUNT", default_value_t = 3,
          value_parser = clap::value_parser!(u32).range(1..))]
    pub image_failure_min: u32,
}

impl BudgetArgs {
    pub fn settings(&self) -> ClaimSettings {
        let each = |limit: Option<GivenLimit>| limit.and_then(|limit| limit.0);
        let (updating, high_impact) =
            (each(self.max_updating_per_location), each(self.max_high_impact_per_location));
        ClaimSettings {
            updating: MachineLimits::new(None, &self.max_updating, updating),
            high_impact: MachineLimits::new(Some(HIGH_IMPACT), &self.max_high_impact, high_impact),
            network: self.network_limit,
            failures: FailureLimits {
                percent: self.image_failure_max,
                blocked_percent: self.blocked_percent,
                failures_min: self.image_failure_min,
            },
        }
    }
}

/// Parses the servers that subs fetch from, as `[LOCATION=]ADDR`. If no server is given for all
/// locations, that is `imageserver`.
pub fn sources(
    given: &[String],
    imageserver: &Peer,
    default_port: u16,
) -> Result<Sources, PeerError> {
    let mut servers = Vec::new();
    for text in given {
        let (location, address) = match text.rsplit_once('=') {
            Some((location, address)) => (Some(location.to_owned()), address),
            None => (None, text.as_str()),
        };
        servers.push((location, Peer::parse(address, default_port)?.authority()));
    }
    if servers.iter().all(|(location, _)| location.is_some()) {
        servers.push((None, imageserver.authority()));
    }
    Ok(Sources::new(&servers))
}
