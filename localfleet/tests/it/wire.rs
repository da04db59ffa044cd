//! The network between the machines and the image server, which stops or loses what passes.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread::{sleep, spawn};
use std::time::Duration;

use model::lock::locked;

/// Passes connections on to a server. Ends with the process.
pub struct Wire {
    pub address: SocketAddr,
    state: Arc<Mutex<State>>,
}

struct State {
    /// Where connections lead; `None` while there is no network.
    server: Option<SocketAddr>,
    /// How many bytes of the server still pass, if not all do.
    left: Option<usize>,
    /// The ends of all connections so far.
    open: Vec<TcpStream>,
}

impl Wire {
    /// Listens. Without [`Wire::lead_to`] it is cut.
    pub fn start() -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let state = Arc::new(Mutex::new(State { server: None, left: None, open: Vec::new() }));
        let shared = Arc::clone(&state);
        spawn(move || {
            for client in listener.incoming() {
                let (Ok(client), Some(server)) = (client, locked(&shared).server) else { continue };
                let Ok(server) = TcpStream::connect(server) else { continue };
                let ends = [&client, &server].map(|end| end.try_clone().unwrap());
                let [asks, answers] = [&client, &server].map(|end| end.try_clone().unwrap());
                locked(&shared).open.extend(ends);
                let state = Arc::clone(&shared);
                spawn(move || pass(asks, server, |length| length));
                spawn(move || pass(answers, client, |length| allowed(&state, length)));
            }
        });
        Self { address, state }
    }

    /// Lets everything pass to `server`.
    pub fn lead_to(&self, server: SocketAddr) {
        let mut state = locked(&self.state);
        (state.server, state.left) = (Some(server), None);
    }

    /// Lets so many more bytes of the server pass; what follows waits.
    pub fn hold_after(&self, bytes: usize) {
        locked(&self.state).left = Some(bytes);
    }

    /// True if all the bytes that may pass have passed.
    pub fn holds(&self) -> bool {
        locked(&self.state).left == Some(0)
    }

    /// Ends all connections, and lets none begin.
    pub fn cut(&self) {
        let mut state = locked(&self.state);
        (state.server, state.left) = (None, None);
        for end in state.open.drain(..) {
            // It may have ended.
            let _is_shut = end.shutdown(Shutdown::Both);
        }
    }
}

/// Returns how many of `length` bytes may pass now.
fn allowed(state: &Mutex<State>, length: usize) -> usize {
    let mut state = locked(state);
    let Some(left) = &mut state.left else { return length };
    let passing = length.min(*left);
    *left -= passing;
    passing
}

fn pass(mut from: TcpStream, mut to: TcpStream, allowed: impl Fn(usize) -> usize) {
    let mut buffer = vec![0; 1 << 16];
    'open: while let Ok(length @ 1..) = from.read(&mut buffer) {
        let mut rest = &buffer[..length];
        while !rest.is_empty() {
            let (passing, later) = rest.split_at(allowed(rest.len()));
            if passing.is_empty() {
                sleep(Duration::from_millis(5));
            } else if to.write_all(passing).is_err() {
                break 'open;
            }
            rest = later;
        }
    }
    // The other side learns that this one has gone.
    let _is_shut = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
}
