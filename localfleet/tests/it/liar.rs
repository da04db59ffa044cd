//! Somebody between the machines and the image server who changes what passes by.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::spawn;

/// Passes connections on, and changes the last byte of each `content` that comes back. Ends with
/// the process.
pub struct Liar {
    pub address: SocketAddr,
    state: Arc<State>,
}

struct State {
    server: OnceLock<SocketAddr>,
    content: Vec<u8>,
    lies: AtomicBool,
    told: AtomicU64,
}

impl Liar {
    /// Listens. Connections are closed until [`Liar::stand_before`] says where they lead.
    pub fn start(content: &str) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let state = Arc::new(State {
            server: OnceLock::new(),
            content: content.as_bytes().to_vec(),
            lies: AtomicBool::new(true),
            told: AtomicU64::new(0),
        });
        let shared = Arc::clone(&state);
        spawn(move || {
            for client in listener.incoming() {
                let (Ok(client), Some(server)) = (client, shared.server.get()) else { continue };
                let Ok(server) = TcpStream::connect(server) else { continue };
                let (asks, answers) = (client.try_clone().unwrap(), server.try_clone().unwrap());
                let state = Arc::clone(&shared);
                spawn(move || pass(asks, server, |_| {}));
                spawn(move || {
                    let mut seen = 0;
                    pass(answers, client, |bytes| state.change(bytes, &mut seen));
                });
            }
        });
        Self { address, state }
    }

    pub fn stand_before(&self, server: SocketAddr) {
        self.state.server.set(server).unwrap();
    }

    pub fn tell_the_truth(&self) {
        self.state.lies.store(false, Ordering::Relaxed);
    }

    /// How often it has lied.
    pub fn told(&self) -> u64 {
        self.state.told.load(Ordering::Relaxed)
    }
}

impl State {
    /// Changes `bytes`; `seen` is how much of the content the bytes before them ended with.
    fn change(&self, bytes: &mut [u8], seen: &mut usize) {
        for byte in bytes {
            // No part of the content begins as the content does, so nothing is overlooked.
            *seen = match *byte {
                byte if byte == self.content[*seen] => *seen + 1,
                byte => usize::from(byte == self.content[0]),
            };
            if *seen == self.content.len() {
                *seen = 0;
                if self.lies.load(Ordering::Relaxed) {
                    *byte ^= 1;
                    self.told.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
    }
}

fn pass(mut from: TcpStream, mut to: TcpStream, mut change: impl FnMut(&mut [u8])) {
    let mut buffer = vec![0; 1 << 16];
    while let Ok(length @ 1..) = from.read(&mut buffer) {
        change(&mut buffer[..length]);
        if to.write_all(&buffer[..length]).is_err() {
            break;
        }
    }
    // The other side learns that this one has gone.
    let _is_closed = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
}
