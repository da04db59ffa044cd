//! A fleet: an imageserver, a dominator and some subds, as processes on loopback addresses.

pub mod certificates;
pub mod daemon_process;

use rpc::tls::Security;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use api::dominator::{
    DominatorStatus, GetStatus, ListSubs, ListSubsRequest, ShowSub, ShowSubRequest, Status,
    SubDetail, SubSummary,
};
use api::method::Method;
use certs::sets::Set;
use model::mdb::Machine;
use rpc::client::{Client, Peer};
use rpc::server::TOKEN_FIELD;

use crate::fleet::certificates::{Certificates, OPERATOR};
use crate::fleet::daemon_process::Daemon;
use crate::programs::RECORD_SERVICE;

/// The most time from the start of a daemon to its first answer.
const READY_MAX: Duration = Duration::from_secs(30);

/// The addresses at which the daemons of a fleet listen.
#[derive(Clone, Debug)]
pub struct Addresses {
    pub imageserver: SocketAddr,
    pub dominator: SocketAddr,
    /// That of [`Fleet::start_filegen`].
    pub filegen: SocketAddr,
    /// The network of the subs: the first three bytes of their addresses.
    pub subs: [u8; 3],
    /// The port of all subs.
    pub subd_port: u16,
}

impl Addresses {
    /// Returns the default ports of the daemons, on 127.0.0.x, for the demo.
    pub fn standard() -> Self {
        let local = IpAddr::V4(Ipv4Addr::LOCALHOST);
        Self {
            imageserver: SocketAddr::new(local, 6971),
            dominator: SocketAddr::new(local, 6970),
            filegen: SocketAddr::new(local, 6972),
            subs: [127, 0, 0],
            subd_port: 6969,
        }
    }

    /// Returns addresses and ports that no other fleet of this machine has, for tests.
    ///
    /// # Errors
    ///
    /// If no port is free.
    pub fn private() -> anyhow::Result<Self> {
        static NEXT: AtomicU8 = AtomicU8::new(1);
        let process = std::process::id();
        let third = NEXT.fetch_add(1, Ordering::Relaxed);
        // 16,384 processes in a row have different networks, with 255 fleets each.
        let second = u8::try_from(1 + process % 250).context("a remainder of 250 fits")?;
        Self::in_network([127, second, third])
    }

    /// Returns addresses in `network`, the first three bytes of addresses that are this machine's,
    /// with free ports.
    ///
    /// # Errors
    ///
    /// If no port is free.
    pub fn in_network(network: [u8; 3]) -> anyhow::Result<Self> {
        let local = IpAddr::V4(Ipv4Addr::new(network[0], network[1], network[2], 1));
        let mut held = Vec::new();
        let mut port = || -> anyhow::Result<u16> {
            let listener = TcpListener::bind((local, 0)).context("no free port")?;
            let port = listener.local_addr().context("a listener has an address")?.port();
            held.push(listener);
            Ok(port)
        };
        Ok(Self {
            imageserver: SocketAddr::new(local, port()?),
            dominator: SocketAddr::new(local, port()?),
            filegen: SocketAddr::new(local, port()?),
            subs: network,
            subd_port: port()?,
        })
    }

    fn sub(&self, index: usize) -> anyhow::Result<SocketAddr> {
        let last = u8::try_from(11 + index).context("a fleet has at most 200 subs")?;
        let [first, second, third] = self.subs;
        let address = Ipv4Addr::new(first, second, third, last);
        Ok(SocketAddr::new(IpAddr::V4(address), self.subd_port))
    }
}

/// The settings of a fleet.
#[derive(Clone, Debug)]
pub struct Options {
    /// The directory of the programs.
    pub programs: PathBuf,
    /// A directory for roots, data, state and logs.
    pub directory: PathBuf,
    /// The number of subs.
    pub subs: usize,
    /// Additional flags for each subd.
    pub subd_flags: Vec<(&'static str, String)>,
    /// Additional flags for the dominator.
    pub dominator_flags: Vec<(&'static str, String)>,
    pub addresses: Addresses,
    /// True to run without certificates.
    pub insecure: bool,
    /// Set to make everything that waits for the fleet fail.
    pub stop: Arc<AtomicBool>,
}

/// One machine of the fleet.
pub struct Sub {
    /// The name in the machine database.
    pub hostname: String,
    pub address: SocketAddr,
    /// The directory that it manages.
    pub root: PathBuf,
    /// A file to which its services append `SERVICE VERB` lines.
    pub services: PathBuf,
    pub daemon: Daemon,
}

impl Sub {
    /// Returns its record in the machine database, without an image.
    #[must_use]
    pub fn record(&self) -> Machine {
        let (hostname, ip_address) = (self.hostname.clone(), Some(self.address.ip()));
        Machine { hostname, ip_address, ..Machine::default() }
    }
}

/// A running fleet. All processes are stopped when it is dropped.
pub struct Fleet {
    options: Options,
    pub dominator: Daemon,
    pub subs: Vec<Sub>,
    pub imageserver: Daemon,
    /// Daemons that were started beside the fleet and stop with it.
    others: Vec<Daemon>,
    certificates: Certificates,
    security: Security,
    client: Client,
    runtime: tokio::runtime::Runtime,
}

impl Fleet {
    /// Starts all daemons, the subs with empty roots, and waits until they answer. No machine is
    /// in the machine database yet.
    ///
    /// # Errors
    ///
    /// If one does not start; the end of its log is in the error.
    pub fn start(options: Options) -> anyhow::Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .context("cannot start the runtime")?;
        for directory in ["log", "roots"] {
            fs::create_dir_all(options.directory.join(directory))
                .context("cannot make a directory")?;
        }
        let certificates = match options.insecure {
            true => Certificates::none(),
            false => Certificates::make(&options.directory.join("tls"))?,
        };
        let security = certificates.security(OPERATOR)?;
        let addresses = &options.addresses;
        let hosts = [&*addresses.imageserver.ip().to_string(), "localhost"];
        certificates.for_daemon("imageserver", Set::Imageserver, &hosts)?;
        let imageserver = start(
            &options,
            &certificates,
            "imageserver",
            "imageserver",
            &[
                ("--listen", addresses.imageserver.to_string()),
                ("--data", shown(&options.directory.join("imageserver"))),
            ],
        )?;
        fs::write(mdb_path(&options), "[]\n").context("cannot write the machine database")?;
        let mut subs = Vec::new();
        for index in 0..options.subs {
            subs.push(start_sub(&options, &certificates, index)?);
        }
        let mut flags = vec![
            ("--listen", addresses.dominator.to_string()),
            ("--imageserver", addresses.imageserver.to_string()),
            ("--mdb", shown(&mdb_path(&options))),
            ("--state", shown(&options.directory.join("dominator"))),
            ("--subd-port", addresses.subd_port.to_string()),
        ];
        flags.extend(options.dominator_flags.iter().cloned());
        let hosts = [&*addresses.dominator.ip().to_string(), "localhost"];
        certificates.for_daemon("dominator", Set::Dominator, &hosts)?;
        let dominator = start(&options, &certificates, "dominator", "dominator", &flags)?;
        let client = client_of(addresses.dominator, &security);
        let mut fleet = Self {
            options,
            dominator,
            subs,
            imageserver,
            others: Vec::new(),
            certificates,
            security,
            client,
            runtime,
        };
        fleet.wait_ready()?;
        Ok(fleet)
    }

    /// The machine database file.
    pub fn mdb(&self) -> PathBuf {
        mdb_path(&self.options)
    }

    pub fn addresses(&self) -> &Addresses {
        &self.options.addresses
    }

    /// Waits until each daemon that runs answers at `/healthz`.
    ///
    /// # Errors
    ///
    /// If one has ended, or does not answer in time.
    pub fn wait_ready(&mut self) -> anyhow::Result<()> {
        let (dominator, imageserver) =
            (self.options.addresses.dominator, self.options.addresses.imageserver);
        let mut daemons =
            vec![(imageserver, &mut self.imageserver), (dominator, &mut self.dominator)];
        daemons.extend(self.subs.iter_mut().map(|sub| (sub.address, &mut sub.daemon)));
        for (address, daemon) in daemons {
            if daemon.id().is_none() {
                continue;
            }
            let client = client_of(address, &self.security);
            wait_for(&self.runtime, &client, daemon, READY_MAX)?;
        }
        Ok(())
    }

    /// Waits until a daemon beside those of the fleet answers at `/healthz`.
    ///
    /// # Errors
    ///
    /// If it has ended, or does not answer within `limit`.
    pub fn wait_for(
        &self,
        address: SocketAddr,
        daemon: &mut Daemon,
        limit: Duration,
    ) -> anyhow::Result<()> {
        wait_for(&self.runtime, &client_of(address, &self.security), daemon, limit)
    }

    /// Starts a filegen-server with this configuration file beside the fleet, and waits until it
    /// answers.
    ///
    /// # Errors
    ///
    /// If it does not start; the end of its log is in the error.
    pub fn start_filegen(&self, config: &Path) -> anyhow::Result<Daemon> {
        let (name, address) = ("filegen-server", self.options.addresses.filegen);
        let hosts = [&*address.ip().to_string(), "localhost"];
        self.certificates.for_daemon(name, Set::FilegenServer, &hosts)?;
        let flags = [
            ("--listen", address.to_string()),
            ("--config", shown(config)),
            ("--state", shown(&self.options.directory.join(name))),
        ];
        let mut daemon = start(&self.options, &self.certificates, name, name, &flags)?;
        self.wait_for(address, &mut daemon, READY_MAX)?;
        Ok(daemon)
    }

    /// Keeps a daemon that was started beside the fleet: it stops with it.
    pub fn keep(&mut self, daemon: Daemon) {
        self.others.push(daemon);
    }

    pub fn certificates(&self) -> &Certificates {
        &self.certificates
    }

    /// Returns the protection of the operator's connections.
    pub fn security(&self) -> &Security {
        &self.security
    }

    /// Replaces the machine database: each sub requires `image`, or none.
    ///
    /// # Errors
    ///
    /// If the file cannot be written.
    pub fn require(&self, image: Option<&str>) -> anyhow::Result<()> {
        let images = self.subs.iter().map(|sub| (sub.hostname.clone(), image.unwrap_or_default()));
        self.require_each(&images.collect())
    }

    /// Replaces the machine database: each sub requires the image that `images` has for its name.
    ///
    /// # Errors
    ///
    /// If the file cannot be written.
    pub fn require_each(&self, images: &BTreeMap<String, &str>) -> anyhow::Result<()> {
        let machines = self.subs.iter().map(|sub| Machine {
            required_image: images
                .get(&sub.hostname)
                .map_or_else(String::new, |image| (*image).to_owned()),
            ..sub.record()
        });
        self.replace_mdb(&machines.collect::<Vec<_>>())
    }

    /// Replaces the machine database in one step.
    ///
    /// # Errors
    ///
    /// If the file cannot be written.
    pub fn replace_mdb(&self, machines: &[Machine]) -> anyhow::Result<()> {
        let text = serde_json::to_string_pretty(machines).context("machines have a JSON form")?;
        let temporary = self.mdb().with_extension("new");
        fs::write(&temporary, text + "\n").context("cannot write the machine database")?;
        fs::rename(&temporary, self.mdb()).context("cannot replace the machine database")
    }

    /// Runs imagetool, as an operator would.
    ///
    /// # Errors
    ///
    /// If it cannot be run. Its failure is in the output.
    pub fn imagetool<S: Into<OsString> + Clone>(&self, words: &[S]) -> anyhow::Result<Output> {
        let server = self.options.addresses.imageserver.to_string();
        self.tool("imagetool", &["--imageserver", &server], words)
    }

    /// Runs domtool, as an operator would.
    ///
    /// # Errors
    ///
    /// If it cannot be run. Its failure is in the output.
    pub fn domtool<S: Into<OsString> + Clone>(&self, words: &[S]) -> anyhow::Result<Output> {
        let server = self.options.addresses.dominator.to_string();
        self.tool("domtool", &["--dominator", &server], words)
    }

    /// Runs filegen-client, as an operator would.
    ///
    /// # Errors
    ///
    /// If it cannot be run. Its failure is in the output.
    pub fn filegen_client<S: Into<OsString> + Clone>(&self, words: &[S]) -> anyhow::Result<Output> {
        let server = self.options.addresses.filegen.to_string();
        self.tool("filegen-client", &["--filegen-server", &server], words)
    }

    /// Runs subtool for the machine at `address`, as an operator would.
    ///
    /// # Errors
    ///
    /// If it cannot be run. Its failure is in the output.
    pub fn subtool<S: Into<OsString> + Clone>(
        &self,
        address: SocketAddr,
        words: &[S],
    ) -> anyhow::Result<Output> {
        let (server, sub) = (self.options.addresses.imageserver.to_string(), address.to_string());
        self.tool("subtool", &["--imageserver", &server, "--subd", &sub], words)
    }

    /// Runs fs2objectcache, as an operator would.
    ///
    /// # Errors
    ///
    /// If it cannot be run. Its failure is in the output.
    pub fn fs2objectcache<S: Into<OsString> + Clone>(&self, words: &[S]) -> anyhow::Result<Output> {
        self.run("fs2objectcache", &[], words)
    }

    fn tool<S: Into<OsString> + Clone>(
        &self,
        name: &str,
        flags: &[&str],
        words: &[S],
    ) -> anyhow::Result<Output> {
        let mine = self.certificates.flags(OPERATOR);
        let flags: Vec<&str> = mine.iter().map(String::as_str).chain(flags.to_vec()).collect();
        self.run(name, &flags, words)
    }

    fn run<S: Into<OsString> + Clone>(
        &self,
        name: &str,
        flags: &[&str],
        words: &[S],
    ) -> anyhow::Result<Output> {
        let words = words.iter().cloned().map(Into::into);
        let program = self.options.programs.join(name);
        let output = Command::new(&program).args(flags).args(words).output();
        output.with_context(|| format!("cannot run {}", program.display()))
    }

    /// Returns the status of all machines from the dominator.
    ///
    /// # Errors
    ///
    /// If it does not answer.
    pub fn statuses(&self) -> anyhow::Result<Vec<SubSummary>> {
        let request = ListSubsRequest::default();
        let reply = self.runtime.block_on(self.client.call::<ListSubs>(&request));
        Ok(reply.context("the dominator does not answer")?.subs)
    }

    /// Returns the status of the dominator, with the number of machines by status.
    ///
    /// # Errors
    ///
    /// If it does not answer.
    pub fn status(&self) -> anyhow::Result<DominatorStatus> {
        let reply = self.runtime.block_on(self.client.call::<GetStatus>(&()));
        reply.context("the dominator does not answer")
    }

    /// Calls any daemon.
    ///
    /// # Errors
    ///
    /// If the call fails.
    pub fn call<M: Method>(
        &self,
        client: &Client,
        request: &M::Request,
    ) -> anyhow::Result<M::Reply> {
        self.runtime.block_on(client.call::<M>(request)).context("a call failed")
    }

    /// Gets a page of any daemon. Returns its HTTP status and content.
    ///
    /// # Errors
    ///
    /// If it does not answer.
    pub fn get(&self, client: &Client, path: &str) -> anyhow::Result<(u16, Vec<u8>)> {
        let (status, content) =
            self.runtime.block_on(client.get(path)).context("a daemon does not answer")?;
        Ok((status, content.to_vec()))
    }

    /// Gets a page of the dominator, and sends its form with these fields beside the token. Returns
    /// the HTTP status of the answer, and its content.
    ///
    /// # Errors
    ///
    /// If it does not answer, or the page has no form.
    pub fn submit(
        &self,
        page: &str,
        form: &str,
        fields: &[(&str, &str)],
    ) -> anyhow::Result<(u16, Vec<u8>)> {
        let (_, html) = self.get(&self.client, page)?;
        let html = String::from_utf8_lossy(&html);
        let field = format!("name=\"{TOKEN_FIELD}\" value=\"");
        let token = html.split_once(&field).and_then(|(_, rest)| rest.split('"').next());
        let token = token.with_context(|| format!("{page} has no form"))?;
        let fields = [fields, &[(TOKEN_FIELD, token)]].concat();
        let answer = self.runtime.block_on(self.client.submit(form, &fields));
        let (status, content) = answer.context("the dominator does not answer")?;
        Ok((status, content.to_vec()))
    }

    /// Returns the details of one machine from the dominator.
    ///
    /// # Errors
    ///
    /// If it does not answer.
    pub fn detail(&self, hostname: &str) -> anyhow::Result<SubDetail> {
        let request = ShowSubRequest { hostname: hostname.to_owned() };
        let reply = self.runtime.block_on(self.client.call::<ShowSub>(&request));
        reply.context("the dominator does not answer")
    }

    /// Calls the subd of one machine.
    ///
    /// # Errors
    ///
    /// If the call fails.
    pub fn ask_sub<M: Method>(
        &self,
        index: usize,
        request: &M::Request,
    ) -> anyhow::Result<M::Reply> {
        let sub = self.subs.get(index).context("there is no such machine")?;
        let reply =
            self.runtime.block_on(client_of(sub.address, &self.security).call::<M>(request));
        reply.with_context(|| format!("{} failed to execute {}", sub.hostname, M::NAME))
    }

    /// Waits until the dominator reports all machines as synced with `image`. Calls `watch` with
    /// every list of machines.
    ///
    /// # Errors
    ///
    /// If a daemon has ended, or not all are synced within `limit`.
    pub fn wait_synced(
        &mut self,
        image: &str,
        limit: Duration,
        mut watch: impl FnMut(&[SubSummary]),
    ) -> anyhow::Result<Duration> {
        let start = Instant::now();
        loop {
            self.check()?;
            // The dominator may be restarting.
            let subs = self.statuses().unwrap_or_default();
            watch(&subs);
            let done = |sub: &SubSummary| {
                sub.status == Status::Synced
                    && sub.required_image == image
                    && sub.last_image == image
            };
            if subs.len() == self.subs.len() && subs.iter().all(done) {
                return Ok(start.elapsed());
            }
            if start.elapsed() > limit {
                let states: Vec<String> = subs
                    .iter()
                    .map(|sub| format!("{}: {} ({})", sub.hostname, sub.status, sub.detail))
                    .collect();
                bail!("not all synced with {image} after {limit:?}: {}", states.join("; "));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Fails if a daemon has ended by itself.
    ///
    /// # Errors
    ///
    /// Names the daemon and its exit status, or says that the run was interrupted.
    pub fn check(&mut self) -> anyhow::Result<()> {
        ensure!(!self.options.stop.load(Ordering::Relaxed), "interrupted");
        self.imageserver.check()?;
        self.dominator.check()?;
        self.others.iter_mut().try_for_each(Daemon::check)?;
        self.subs.iter_mut().try_for_each(|sub| sub.daemon.check())
    }

    /// Returns the addresses and some commands to try.
    pub fn access_help(&self) -> String {
        let Addresses { imageserver, dominator, .. } = &self.options.addresses;
        let programs = self.options.programs.display();
        let scheme = self.security.scheme();
        let mut text = format!(
            "  dominator    {scheme}://{dominator}/\n  imageserver  {scheme}://{imageserver}/\n"
        );
        for sub in &self.subs {
            text.push_str(&format!(
                "  {:<12} {scheme}://{}/  root {}\n",
                sub.hostname,
                sub.address,
                sub.root.display()
            ));
        }
        if let Some(file) = self.certificates.authority_file() {
            text.push_str(&format!("  authority    {} (for browsers)\n", file.display()));
        }
        let flags = self.certificates.flags(OPERATOR).join(" ");
        text.push_str(&format!(
            "  database     {}\n\nTry:\n  {programs}/domtool {flags} list-subs\n  \
             {programs}/imagetool {flags} list\n",
            self.mdb().display()
        ));
        text
    }

    /// Stops all daemons with SIGTERM.
    ///
    /// # Errors
    ///
    /// If one fails to stop.
    pub fn stop(&mut self) -> anyhow::Result<()> {
        self.dominator.stop()?;
        self.others.iter_mut().try_for_each(Daemon::stop)?;
        self.subs.iter_mut().try_for_each(|sub| sub.daemon.stop())?;
        self.imageserver.stop()
    }
}

fn mdb_path(options: &Options) -> PathBuf {
    options.directory.join("mdb.json")
}

fn shown(path: &Path) -> String {
    path.display().to_string()
}

fn wait_for(
    runtime: &tokio::runtime::Runtime,
    client: &Client,
    daemon: &mut Daemon,
    limit: Duration,
) -> anyhow::Result<()> {
    let start = Instant::now();
    loop {
        daemon.check()?;
        let answer = runtime.block_on(client.get("/healthz"));
        if matches!(answer, Ok((200, _))) {
            return Ok(());
        }
        if start.elapsed() > limit {
            bail!("{} does not answer at {}", daemon.name(), client.peer());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Returns a client of the daemon at an address.
pub fn client_of(address: SocketAddr, security: &Security) -> Client {
    let host = address.ip().to_string();
    Client::new(Peer { host, port: address.port(), address: Some(address.ip()) }, security)
}

fn start(
    options: &Options,
    certificates: &Certificates,
    program: &str,
    name: &str,
    flags: &[(&str, String)],
) -> anyhow::Result<Daemon> {
    let mut arguments: Vec<OsString> =
        certificates.flags(name).into_iter().map(Into::into).collect();
    for (flag, value) in flags {
        arguments.push(flag.into());
        arguments.push(value.into());
    }
    let log = options.directory.join("log").join(format!("{name}.log"));
    Daemon::start(name, &options.programs.join(program), arguments, log)
}

fn start_sub(options: &Options, certificates: &Certificates, index: usize) -> anyhow::Result<Sub> {
    let hostname = format!("sub-{}", index + 1);
    let address = options.addresses.sub(index)?;
    let root = options.directory.join("roots").join(&hostname);
    fs::create_dir_all(&root).context("cannot make a root")?;
    let services = options.directory.join("log").join(format!("{hostname}.services"));
    let record = options.programs.join(RECORD_SERVICE);
    let record = format!("{} {}", shown(&record), shown(&services));
    let mut flags = vec![
        ("--listen", address.to_string()),
        ("--root", shown(&root)),
        ("--hostname", hostname.clone()),
        ("--service-command", record),
        // The health checks of the fleet's images are about this machine.
        ("--health-command", "env".to_owned()),
        // All subs share one disk; their measurements would disturb each other.
        ("--device-speed", "1000000000".to_owned()),
    ];
    flags.extend(options.subd_flags.iter().cloned());
    let hosts = [&*hostname, &*address.ip().to_string()];
    certificates.for_daemon(&hostname, Set::Subd, &hosts)?;
    let daemon = start(options, certificates, "subd", &hostname, &flags)?;
    Ok(Sub { hostname, address, root, services, daemon })
}
