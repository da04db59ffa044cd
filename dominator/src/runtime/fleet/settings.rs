//! The limits of subs: saves what operators set, and sends it to the machines.

use std::sync::Arc;
use std::time::Duration;

use api::dominator::settings::{
    GetSubConfigurationReply, GetSubLimitsRequest, Level, Limit, MachineConfiguration,
    SetSubConfigurationRequest,
};

use api::subd::{GetLimits, GetLimitsReply};
use model::display::error_chain;

use super::{Fleet, OrderError};
use crate::core::orders::Order;
use crate::core::settings::{Settings, is_about};
use crate::core::sub::SubOrder;
use crate::runtime::driver::client_of;
use crate::storage::with_order;

/// How long a machine may take to answer an operator.
const ASK_LIMIT: Duration = Duration::from_secs(5);

impl Fleet {
    /// Gives values for a level, or takes some back. Returns how many machines the level is about.
    /// On an error nothing is changed.
    pub async fn configure(
        self: &Arc<Self>,
        request: SetSubConfigurationRequest,
    ) -> Result<u32, OrderError> {
        // A mistyped name would stay without effect.
        let gives = request.values.values().any(Option::is_some);
        if let Level::Host(hostname) = &request.level
            && gives
        {
            self.locked().watched(hostname)?;
        }
        let SetSubConfigurationRequest { level, values, why, who } = request.clone();
        let value = |(limit, percent): (&Limit, &Option<u8>)| match percent {
            Some(percent) => format!("{}={percent}", limit.name()),
            None => format!("{}=", limit.name()),
        };
        let values: Vec<String> = values.iter().map(value).collect();
        let values = values.join(" ");
        let order =
            Order::new("set-config", &who).about(format_args!("{level}: {values}")).why(&why);
        let now = self.shared.clock.now().wall;
        let save = move |fleet: &Self| {
            let change = |settings: &mut Settings| {
                let after = settings.after(&request, now);
                *settings = after.map_err(|source| OrderError::Settings { source })?;
                Ok(())
            };
            fleet.state().settings.modify_through(change, with_order(&order))
        };
        self.on_thread(save).await?;
        tracing::warn!(%who, %level, %values, %why, "the configuration of subs is changed");
        Ok(self.send_limits(&level))
    }

    /// Asks a machine which limits hold there, and why.
    pub async fn limits_in_force(
        &self,
        request: GetSubLimitsRequest,
    ) -> Result<GetLimitsReply, OrderError> {
        let GetSubLimitsRequest { hostname } = request;
        let (handle, machine) = self.find(&hostname)?;
        let reply = match handle.with_sub(|sub| sub.expect_right_machine()) {
            Ok(()) => {
                let client = client_of(&machine, &self.shared);
                let reply = client.call_within::<GetLimits>(&(), ASK_LIMIT).await;
                reply.map_err(|error| error_chain(&error))
            }
            Err(why) => Err(why),
        };
        reply.map_err(|why| OrderError::NoLimits { hostname, why })
    }

    /// Sends their limits to the machines that `level` is about. Returns their number.
    fn send_limits(&self, level: &Level) -> u32 {
        let inner = self.locked();
        // Read while `inner` is locked: of two calls the later one has the later settings.
        let settings = self.state().settings.get();
        let mut machines = 0;
        for watched in inner.watched.values().filter(|watched| is_about(level, &watched.machine)) {
            machines += 1;
            let limits = settings.limits_of(&watched.machine);
            watched.handle.order(SubOrder::SetLimits(limits), &self.shared);
        }
        machines
    }

    /// Returns the values that are set, or those of one machine.
    pub fn configuration(
        &self,
        hostname: Option<&str>,
    ) -> Result<GetSubConfigurationReply, OrderError> {
        let settings = self.state().settings.get();
        let Some(hostname) = hostname else {
            return Ok(GetSubConfigurationReply { levels: settings.all(), machine: None });
        };
        let inner = self.locked();
        let watched = inner.watched(hostname)?;
        let (reported, trouble) = watched.handle.with_sub(|sub| {
            let reported = sub.view().map(|view| view.report.limits);
            (reported, sub.limits_error().map(str::to_owned))
        });
        let machine = MachineConfiguration {
            hostname: hostname.to_owned(),
            wanted: settings.limits_of(&watched.machine),
            from: settings.origins_of(&watched.machine),
            reported,
            trouble,
        };
        let levels = settings.about(&watched.machine);
        Ok(GetSubConfigurationReply { levels, machine: Some(machine) })
    }
}
