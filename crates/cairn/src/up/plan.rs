//! What will run: ports, directories and the configuration of every child.

use std::fmt::Write as _;
use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use cairn_proto::HeldPort;

use super::child::ChildSpec;
use super::{EngineSource, UpArgs};

/// Ports after the first router's that other roles use, so that a restart finds the same addresses.
const INDEX_PORTS_FROM: u16 = 20;
const OPS_PORTS_FROM: u16 = 40;
const ENGINE_PORTS_FROM: u16 = 100;

/// Agents that share the simulated engines, as hosts would.
const AGENTS_MAX: usize = 2;

/// Everything that `up` starts.
pub struct Plan {
    /// Ports of the routers.
    pub routers: Vec<u16>,
    /// Ports of the index nodes.
    pub index: Vec<u16>,
    /// Base URLs of all engines.
    pub engines: Vec<String>,
    /// Whether they are simulated.
    pub simulated: bool,
    /// Where state and logs live.
    pub data: PathBuf,
    temporary: Option<tempfile::TempDir>,
    // Held as long as the plan: nobody else writes configurations there.
    _lock: File,
    // Held as long as the plan: a child that died finds its port free when it is started again.
    _ports: Vec<HeldPort>,
    waves: Vec<Vec<ChildSpec>>,
}

impl Plan {
    /// Chooses ports, makes the directories and writes the configurations.
    pub fn new(args: &UpArgs) -> anyhow::Result<Self> {
        let (data, temporary) = data_dir(args.data.as_deref())?;
        let lock = lock(&data)?;
        let mut ports = Ports {
            base: args.port,
            held: Vec::new(),
        };
        let routers = ports.take(0, args.routers)?;
        let index = ports.take(INDEX_PORTS_FROM, args.index_nodes)?;
        let source = args.engine_source();
        let mut engine_ports = Vec::new();
        let engines: Vec<String> = match &source {
            EngineSource::Simulated(count) => {
                engine_ports = ports.take(ENGINE_PORTS_FROM, *count)?;
                engine_ports
                    .iter()
                    .map(|port| format!("http://127.0.0.1:{port}"))
                    .collect()
            }
            EngineSource::Urls(urls) => urls.iter().map(|url| base_url(url)).collect::<anyhow::Result<_>>()?,
        };
        let ops_count = index.len() + AGENTS_MAX;
        let ops = ports.take(OPS_PORTS_FROM, u32::try_from(ops_count)?)?;
        let simulated = matches!(source, EngineSource::Simulated(_));
        let mut plan = Self {
            routers,
            index,
            engines,
            simulated,
            data,
            temporary,
            _lock: lock,
            _ports: ports.held,
            waves: Vec::new(),
        };
        plan.write(args, &engine_ports, &ops)?;
        Ok(plan)
    }

    /// Children in the order in which they start; those of one wave start together.
    pub fn waves(&self) -> Vec<Vec<ChildSpec>> {
        self.waves.clone()
    }

    /// Removes what needn't outlive the cluster.
    pub fn clean_up(mut self) {
        if let Some(folder) = self.temporary.take()
            && let Err(error) = folder.close()
        {
            crate::output::note(format!("the temporary directory was not removed: {error}"));
        }
    }

    /// Leaves everything where it is and says so: after a failure the logs are wanted.
    pub fn keep(mut self) {
        if let Some(folder) = self.temporary.take() {
            crate::output::note(format!("state and logs are kept in {}", folder.keep().display()));
        }
    }

    fn write(&mut self, args: &UpArgs, engine_ports: &[u16], ops: &[u16]) -> anyhow::Result<()> {
        let telemetry = telemetry(&args.otlp);
        let mut first = Vec::new();
        for (i, port) in engine_ports.iter().enumerate() {
            let text = engine_config(*port, args.sim_speed, &telemetry);
            first.push(self.child(&format!("engine-{}", i + 1), "engine", &text)?);
        }
        for (i, port) in self.index.clone().iter().enumerate() {
            let text = self.index_config(i, *port, ops[i], &telemetry);
            first.push(self.child(&format!("index-{}", i + 1), "index", &text)?);
        }
        let mut second = Vec::new();
        let agents = if self.simulated {
            AGENTS_MAX.min(self.engines.len())
        } else {
            1
        };
        for agent in 0..agents {
            let engines: Vec<String> = self.engines.iter().skip(agent).step_by(agents).cloned().collect();
            let text = self.agent_config(agent, &engines, ops[self.index.len() + agent], &telemetry);
            second.push(self.child(&format!("agent-{}", agent + 1), "agent", &text)?);
        }
        for (i, port) in self.routers.clone().iter().enumerate() {
            let text = self.router_config(i, *port, args, &telemetry);
            second.push(self.child(&format!("router-{}", i + 1), "router", &text)?);
        }
        self.waves = vec![first, second];
        Ok(())
    }

    fn child(&self, name: &str, role: &'static str, config: &str) -> anyhow::Result<ChildSpec> {
        let path = self.data.join("config").join(format!("{name}.toml"));
        std::fs::write(&path, config).with_context(|| format!("writing {}", path.display()))?;
        let log = self.data.join("log").join(format!("{name}.log"));
        Ok(ChildSpec {
            name: name.to_owned(),
            role,
            config: path,
            log,
        })
    }

    fn index_addresses(&self) -> String {
        let urls: Vec<String> = self
            .index
            .iter()
            .map(|port| format!("\"http://127.0.0.1:{port}\""))
            .collect();
        urls.join(", ")
    }

    fn index_config(&self, i: usize, port: u16, ops: u16, telemetry: &str) -> String {
        let mut text = format!(
            "cluster = \"cairn-up\"\nnode_id = {}\nlisten = \"127.0.0.1:{port}\"\nadvertise = \"127.0.0.1:{port}\"\n\
             data_dir = {}\nops_listen = \"127.0.0.1:{ops}\"\n",
            i + 1,
            quoted(&self.data.join(format!("index-{}", i + 1))),
        );
        for (peer, port) in self.index.iter().enumerate() {
            // Writing to a string does not fail.
            let _ = write!(text, "\n[[peers]]\nid = {}\naddress = \"127.0.0.1:{port}\"\n", peer + 1);
        }
        text + telemetry
    }

    fn agent_config(&self, i: usize, engines: &[String], ops: u16, telemetry: &str) -> String {
        let mut text = format!(
            "data_dir = {}\nindex = [{}]\n\n[agent]\nid = \"agent-{n}\"\nhost = \"host-{n}\"\n\n[ops]\nlisten = \"127.0.0.1:{ops}\"\n",
            quoted(&self.data.join(format!("agent-{}", i + 1))),
            self.index_addresses(),
            n = i + 1,
        );
        for url in engines {
            let _ = write!(text, "\n[[engine]]\nurl = \"{url}\"\n");
        }
        text + telemetry
    }

    fn router_config(&self, i: usize, port: u16, args: &UpArgs, telemetry: &str) -> String {
        let mut text = format!(
            "listen = \"127.0.0.1:{port}\"\nname = \"router-{}\"\nindex = [{}]\npolicy = {}\ndata_dir = {}\n",
            i + 1,
            self.index_addresses(),
            toml::Value::String(args.policy.clone()),
            quoted(&self.data.join(format!("router-{}", i + 1))),
        );
        if let Some(folder) = &args.tokenizer {
            let _ = writeln!(text, "tokenizer = {}", quoted(folder));
        }
        text + telemetry
    }
}

fn data_dir(wanted: Option<&Path>) -> anyhow::Result<(PathBuf, Option<tempfile::TempDir>)> {
    let (path, temporary) = match wanted {
        Some(path) => {
            std::fs::create_dir_all(path).with_context(|| format!("making the data directory {}", path.display()))?;
            let path = path
                .canonicalize()
                .with_context(|| format!("finding {}", path.display()))?;
            (path, None)
        }
        None => {
            let folder = tempfile::Builder::new()
                .prefix("cairn-up-")
                .tempdir()
                .context("making a temporary directory")?;
            (folder.path().to_path_buf(), Some(folder))
        }
    };
    for part in ["config", "log"] {
        let part = path.join(part);
        std::fs::create_dir_all(&part).with_context(|| format!("making {}", part.display()))?;
    }
    Ok((path, temporary))
}

/// Takes the data directory for this cluster alone, before anything is written there.
fn lock(data: &Path) -> anyhow::Result<File> {
    let path = data.join("up.lock");
    let file = File::create(&path).with_context(|| format!("opening {}", path.display()))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => bail!(
            "another `cairn up` uses {}; end it, or give this one another --data directory",
            data.display()
        ),
        Err(TryLockError::Error(error)) => Err(error).with_context(|| format!("locking {}", path.display())),
    }
}

/// A path as a TOML string.
fn quoted(path: &Path) -> String {
    toml::Value::String(path.display().to_string()).to_string()
}

fn base_url(url: &str) -> anyhow::Result<String> {
    let parsed: http::Uri = url
        .parse()
        .with_context(|| format!("--engine {url}: not a URL; use http://host:port"))?;
    if !matches!(parsed.scheme_str(), Some("http" | "https")) || parsed.authority().is_none() {
        bail!("--engine {url}: not a base URL; use http://host:port");
    }
    Ok(url.trim_end_matches('/').trim_end_matches("/v1").to_owned())
}

fn telemetry(otlp: &str) -> String {
    format!(
        "\n[telemetry]\notlp_endpoint = {}\n",
        toml::Value::String(otlp.to_owned())
    )
}

fn engine_config(port: u16, speed: f64, telemetry: &str) -> String {
    format!(
        "listen = \"127.0.0.1:{port}\"\nmodel = \"cairn-demo\"\nmax_model_len = 32768\n\n\
         [timing]\nspeed = {speed:?}\n\n[events]\nendpoint = \"tcp://127.0.0.1:0\"\nreplay_endpoint = \"tcp://127.0.0.1:0\"\n{telemetry}"
    )
}

/// Hands out ports: consecutive ones from a base, or free ones where the base is 0.
struct Ports {
    base: u16,
    held: Vec<HeldPort>,
}

impl Ports {
    fn take(&mut self, offset: u16, count: u32) -> anyhow::Result<Vec<u16>> {
        (0..count)
            .map(|i| {
                let port = match self.base {
                    0 => 0,
                    base => {
                        let wanted = u32::from(base) + u32::from(offset) + i;
                        u16::try_from(wanted).ok().with_context(|| format!("--port {base} leaves no room: {wanted} is no port"))?
                    }
                };
                let held = HeldPort::hold(port).with_context(|| {
                    format!("port {port} is in use; end what listens there, or choose other ports with --port P (0 picks free ones)")
                })?;
                let port = held.port();
                self.held.push(held);
                Ok(port)
            })
            .collect()
    }
}
