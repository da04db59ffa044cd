//! Carries out what is decided of the limits of subs: keeps what operators give in the state
//! directory, and tells the machines that it is about.

use api::dominator::settings::{
    GetSubConfigurationReply, Level, Limit, MachineConfiguration, SetSubConfigurationRequest,
};

use super::{Fleet, OrderError};
use crate::core::order::Order;
use crate::core::settings::{Settings, is_about};
use crate::core::sub::SubOrder;
use system::clock::wall;

/// What they are kept under in the state directory.
pub const SETTINGS: &str = "subs";

impl Fleet {
    /// Gives values for a level, or takes some back; says how many machines the level is about.
    ///
    /// # Errors
    ///
    /// [`OrderError`]; nothing is changed then.
    pub async fn configure(&self, request: SetSubConfigurationRequest) -> Result<u32, OrderError> {
        let _turn = self.configuring.lock().await;
        let before = {
            let inner = self.inner.lock().expect("no holder panics");
            // A name that is mistyped would be about nothing for ever.
            let gives = request.values.values().any(Option::is_some);
            if let Level::Host(hostname) = &request.level
                && gives
            {
                inner.watched(hostname)?;
            }
            inner.settings.clone()
        };
        let after =
            before.after(&request, wall()).map_err(|source| OrderError::Settings { source })?;
        let SetSubConfigurationRequest { level, values, why, who } = &request;
        let value = |(limit, percent): (&Limit, &Option<u8>)| match percent {
            Some(percent) => format!("{}={percent}", limit.name()),
            None => format!("{}=", limit.name()),
        };
        let values: Vec<String> = values.iter().map(value).collect();
        let values = values.join(" ");
        let order = Order::of("set-config", who).about(format_args!("{level}: {values}")).why(why);
        let kept = after.clone();
        self.write(move |state| state.set_ordered(SETTINGS, Some(&kept), &order)).await?;
        tracing::warn!(%who, %level, %values, %why, "the configuration of subs is changed");
        Ok(self.put_in_force(after, level))
    }

    /// Tells each machine that `level` is about; gives their number.
    fn put_in_force(&self, settings: Settings, level: &Level) -> u32 {
        let mut inner = self.inner.lock().expect("no holder panics");
        inner.settings = settings;
        let mut machines = 0;
        for watched in inner.watched.values().filter(|watched| is_about(level, &watched.machine)) {
            machines += 1;
            let limits = inner.settings.limits_of(&watched.machine);
            watched.handle.order(SubOrder::SetLimits(limits), &self.shared);
        }
        machines
    }

    /// The values that are given, or those of one machine.
    ///
    /// # Errors
    ///
    /// [`OrderError::Unknown`].
    pub fn configuration(
        &self,
        hostname: Option<&str>,
    ) -> Result<GetSubConfigurationReply, OrderError> {
        let inner = self.inner.lock().expect("no holder panics");
        let Some(hostname) = hostname else {
            return Ok(GetSubConfigurationReply { levels: inner.settings.all(), machine: None });
        };
        let watched = inner.watched(hostname)?;
        let (reported, trouble) = watched.handle.look(|sub| {
            let reported = sub.view().map(|view| view.report.limits);
            (reported, sub.limits_trouble().map(str::to_owned))
        });
        let machine = MachineConfiguration {
            hostname: hostname.to_owned(),
            wanted: inner.settings.limits_of(&watched.machine),
            from: inner.settings.origins_of(&watched.machine),
            reported,
            trouble,
        };
        let levels = inner.settings.about(&watched.machine);
        Ok(GetSubConfigurationReply { levels, machine: Some(machine) })
    }
}
