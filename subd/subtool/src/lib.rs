//! `subtool`: inspects one machine and updates it, without a dominator.
//!
//! Data goes to stdout, progress and hints to stderr.

pub mod error;
pub mod file;
pub mod machine;
pub mod progress;
mod provision;
pub mod push;
mod resource;
pub mod rows;
mod run;
pub mod task;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use api::dominator::settings::Limit;
use api::subd::Limits;
use clap::{Args, Parser, Subcommand};
use daemon::{EXIT_FAILED, SecurityArgs, config, exit};
use model::display::error_chain;
use model::image::ImageName;
use model::path::TreePath;
use model::time_parse;
use tool::Format;
use tool::documents::{self, Documents};

/// Inspects one machine and updates it, without a dominator.
#[derive(Debug, Parser)]
#[command(
    name = "subtool",
    version,
    after_help = "Examples:\n  \
        subtool --subd web1 poll\n  \
        subtool --subd web1 pause --for 2h --reason 'database migration'\n  \
        subtool --subd web1 --imageserver images show-update base/debian-12\n  \
        subtool --subd web1 --imageserver images push-image base/debian-12\n\n\
        Defaults for --subd, --imageserver, --tls and others may stand in\n\
        ~/.config/dominator/config.toml.\n\n\
        Exit codes: 0 done, 1 failed, 2 misuse, 3 done but for triggers or the health check;\n\
        of show-update: 0 the machine equals the image, 3 it differs."
)]
pub struct Arguments {
    /// The machine, as HOST or HOST:PORT of its subd
    #[arg(
        long,
        value_name = "ADDR",
        env = "DOMINATOR_SUBD",
        default_value = "localhost:6969",
        global = true
    )]
    subd: String,

    /// The imageserver, as HOST or HOST:PORT: for what needs an image
    #[arg(
        long,
        value_name = "ADDR",
        env = "DOMINATOR_IMAGESERVER",
        default_value = "localhost:6971",
        global = true
    )]
    imageserver: String,

    /// How to print data
    #[arg(long, value_enum, default_value_t = Format::Table, global = true)]
    format: Format,

    /// How long to wait for long operations, such as 90s, 15m or 2h
    #[arg(long, value_name = "DURATION", default_value = "1h", global = true)]
    #[arg(value_parser = time_parse::duration)]
    timeout: Duration,

    #[command(flatten)]
    security: SecurityArgs,

    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Show what the machine reports
    #[command(after_help = "Example: subtool --subd web1 poll --format json")]
    Poll {
        /// Wait until there is news first, for up to two minutes
        #[arg(long)]
        wait: bool,
    },
    /// Scan now, without the usual limits, and wait for the end
    ///
    /// A metadata pass is always run: it finds all changes that changed a time stamp.
    Scan {
        /// Hash every file too, through the page cache
        #[arg(long)]
        content: bool,
        /// Hash every file as the medium has it, around the page cache
        #[arg(long)]
        media: bool,
    },
    /// Print the scanned tree, one line for each path
    ///
    /// The lines are those of imagetool show, so that the two can be compared with diff.
    Show,
    /// Show the scan settings of the machine and the limits that were set
    GetConfig,
    /// Limit what subd uses of the machine, until the limits are set again
    ///
    /// What the machine's own configuration sets is a ceiling: a higher limit changes nothing.
    /// Where it sets none, these limits replace the default. Limits that are not named stay as they
    /// are.
    #[command(after_help = "Example: subtool --subd web1 set-config scan-percent=1")]
    SetConfig(LimitArgs),
    /// Refuse every update until a time, also over restarts of subd
    ///
    /// It works while the dominator is down, and takes precedence over it. An update that has begun
    /// is finished. A pause lasts at most 30 days; it replaces an earlier one.
    #[command(after_help = "Examples:\n  subtool --subd web1 pause --for 2h \
        --reason 'disk swap'\n  \
        subtool --subd web1 pause --until 18:30 --reason 'release in progress'")]
    Pause(PauseArgs),
    /// End a pause
    Resume,
    /// Give the machine to another dominator
    ///
    /// A dominator holds a machine for an hour after its orders, so that two with different images
    /// do not take turns. Orders by hand, such as push-image, need no hold.
    #[command(after_help = "Example: subtool --subd web1 take-over --dominator dom2-1f00c0de")]
    TakeOver {
        /// The dominator that gives orders from now on, by the name that is on its page and in its
        /// log; without it, the first that asks
        #[arg(long, value_name = "NAME")]
        dominator: Option<String>,
    },
    /// Forget when the content of a computed file was signed
    ///
    /// A machine that accepts only signed images refuses content that was signed before what it
    /// has. After this, the file can get such content once: for example if the clock of the
    /// filegen-server was ahead. The content that it has stays accepted. A certificate needs the
    /// power Subd.ForgetIssued.
    #[command(after_help = "Example: subtool --subd web1 forget-issued /etc/shadow \
        --why 'the clock of filegen was wrong'")]
    ForgetIssued {
        /// The path of the computed file
        path: TreePath,
        /// Why, for the audit log of the machine
        #[arg(long, value_name = "TEXT")]
        why: String,
    },
    /// Show what an update to an image would change, and why; nothing is changed
    ///
    /// A machine that does not scan with the settings of the image does so once for this, within
    /// its limits; its own settings stay. Exits with 0 if the machine equals the image, and with 3
    /// if it differs.
    ShowUpdate {
        /// The image
        image: ImageName,
    },
    /// Update the machine to an image: the whole cycle of a dominator, once
    ///
    /// If a dominator manages the machine, it returns the machine to the image of its database.
    PushImage {
        /// The image
        image: ImageName,
        /// Update although the update removes half of the machine, or subd, init or the kernel
        #[arg(long)]
        force_unsafe: bool,
        /// Do work of high impact without asking the machine's disruption command
        #[arg(long)]
        force_disruption: bool,
        /// Leave out the paths that the machine cannot change; then exit with 3
        #[arg(long)]
        go_on: bool,
        /// Object server as the machine reaches it, instead of the imageserver; may be repeated
        #[arg(long, value_name = "ADDR")]
        source: Vec<String>,
    },
    /// Copy a regular file of the machine
    GetFile {
        /// Its path on the machine
        path: TreePath,
        /// The destination; without it, the file is printed
        file: Option<PathBuf>,
    },
    /// Remove unneeded objects from the machine's cache
    ///
    /// Objects of the machine's image are kept, for a repair.
    Cleanup {
        /// Remove all
        #[arg(long)]
        all: bool,
    },
    /// Wait until the machine was updated to an image, and that is verified
    #[command(after_help = "Example: subtool --subd web1 wait-for-image base/1 --timeout 10m")]
    WaitForImage {
        /// The image
        image: ImageName,
    },
    /// Run the health check of the machine's image now; nothing is undone if it fails
    CheckHealth,
    /// List the daemon tasks of the machine, and give orders about them
    #[command(after_help = "Examples:\n  subtool --subd web1 task list\n  \
        subtool --subd web1 task hold logd --why 'disk swap'")]
    Task {
        #[command(subcommand)]
        task: task::TaskCommand,
    },
    /// List the resources of the machine, which plugins make
    Resource {
        #[command(subcommand)]
        resource: resource::ResourceCommand,
    },
    /// Run the triggers again that failed, and wait for the end
    ///
    /// Exits with 1 if some fail again.
    RetryTriggers,
    /// Provision a directory of resources by hand
    ///
    /// DIR has resource files, NAME.json, and says in provisioners.toml which provisioner makes
    /// resources of which kinds, and as which user its plugin runs. DIR may also be as
    /// /etc/dominator is in an image, with the resource files in DIR/resources.d. Resources that
    /// are as they were asked for before are left alone; the others are provisioned in waves: each
    /// after all that it needs. Then those that no file asks for any more, and whose on_removal is
    /// destroy, are destroyed.
    ///
    /// The plugin dom-provisioner-NAME is looked up in the directories that --plugins names, in
    /// DIR, beside subtool, and in /usr/local/lib/dominator, /usr/lib/dominator, /usr/local/bin and
    /// /usr/bin. Only root, and who runs this, may be able to write the plugin, its directory, and
    /// all files of DIR.
    ///
    /// It may be stopped or killed at any time: run again, it goes on where it was. What plugins do
    /// by themselves is waited for as long as --timeout says.
    ///
    /// Needs neither subd nor a certificate.
    #[command(after_help = "Examples:\n  \
        subtool provision --local /srv/resources --plan\n  \
        subtool provision --local /srv/resources\n  \
        subtool provision --local /etc/dominator --state /var/lib/provision --format json\n\n\
        Exit codes: 0 all is there, 1 failed, 2 misuse;\n\
        of --plan: 0 nothing to do, 1 nothing can be done, 3 something to do.\n\n\
        docs/PROVISIONING.md explains the files, and how to write a plugin.")]
    Provision(provision::Arguments),
    #[command(flatten)]
    Documents(Documents),
}

/// The limits of a machine.
#[derive(Clone, Debug, Args)]
#[group(required = true, multiple = true)]
struct LimitArgs {
    /// A limit and its value, 1 to 100 per cent; an empty value removes it. The limits are
    /// cpu-percent (of one core, for the content and media passes), scan-percent and write-percent
    /// (of the device's speed, for reading it and for writing what is fetched) and network-percent
    /// (of the network's speed, for fetching)
    #[arg(value_name = "LIMIT=PERCENT", value_parser = Limit::parse_change)]
    values: Vec<(Limit, Option<u8>)>,
    /// First remove all limits that were set over the network
    #[arg(long)]
    reset: bool,
    // As former releases had it.
    #[arg(long, hide = true, value_parser = clap::value_parser!(u8).range(1..=100))]
    cpu_percent: Option<u8>,
    #[arg(long, hide = true, value_parser = clap::value_parser!(u8).range(1..=100))]
    scan_percent: Option<u8>,
    #[arg(long, hide = true, value_parser = clap::value_parser!(u8).range(1..=100))]
    write_percent: Option<u8>,
    #[arg(long, hide = true, value_parser = clap::value_parser!(u8).range(1..=100))]
    network_percent: Option<u8>,
}

impl LimitArgs {
    /// Returns the limits that replace `old`.
    fn after(&self, old: Limits) -> Limits {
        let mut limits = if self.reset { Limits::default() } else { old };
        let former = [
            (Limit::CpuPercent, self.cpu_percent),
            (Limit::ScanPercent, self.scan_percent),
            (Limit::WritePercent, self.write_percent),
            (Limit::NetworkPercent, self.network_percent),
        ];
        for (limit, value) in former.into_iter().filter(|(_, value)| value.is_some()) {
            let name = limit.name();
            eprintln!("warning: the next release has no --{name}: write {name}=PERCENT");
            *limit.of_mut(&mut limits) = value;
        }
        for (limit, value) in &self.values {
            *limit.of_mut(&mut limits) = *value;
        }
        limits
    }
}

/// The end of a pause, and its reason.
#[derive(Clone, Debug, Args)]
struct PauseArgs {
    #[command(flatten)]
    end: PauseEnd,
    /// The reason, which is shown to all users
    #[arg(long, value_name = "TEXT")]
    reason: String,
}

#[derive(Clone, Debug, Args)]
#[group(required = true, multiple = false)]
struct PauseEnd {
    /// Until when: 18:30, 2030-01-31T18:30 or 2030-01-31T18:30:00Z
    #[arg(long, value_name = "TIME")]
    until: Option<String>,
    /// For how long: 90s, 15m, 2h or 3d
    #[arg(long = "for", value_name = "DURATION", value_parser = time_parse::duration)]
    lasting: Option<Duration>,
}

/// Runs the program, with the arguments of this process.
pub fn main() -> ExitCode {
    let arguments: Arguments = config::parse_tool();
    if let Command::Documents(documents) = &arguments.command {
        return documents::run::<Arguments>(documents);
    }
    if let Command::Provision(asked) = &arguments.command {
        return provision::run(arguments.format, arguments.timeout, asked);
    }
    let security = match arguments.security.for_tool("subtool") {
        Ok(security) => security,
        Err(error) => return error.exit(),
    };
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return exit(EXIT_FAILED, &format!("cannot start: {error}"), &[]),
    };
    match runtime.block_on(run::run(&arguments, &security)) {
        Ok(output) => output.print(),
        Err(error) => exit(error.exit_code(), &error_chain(&error), &error.hints()),
    }
}
