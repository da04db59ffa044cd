//! A web server on a port of this machine, which answers what the test says.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

/// How a path is answered.
#[derive(Clone, Debug)]
pub enum Answer {
    /// With these bytes.
    Raw(String),
    /// With one byte after another, for ever.
    Drip,
    /// Never, while the connection stays open.
    Silence,
}

/// Answers by path and query; what is not there is answered with 404.
#[derive(Clone, Default)]
pub struct Web {
    answers: Arc<Mutex<BTreeMap<String, Answer>>>,
    requests: Arc<Mutex<Vec<String>>>,
}

impl Web {
    /// Starts a server, and gives its port.
    pub async fn start(&self) -> u16 {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let web = self.clone();
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let web = web.clone();
                tokio::spawn(async move { web.answer(stream).await });
            }
        });
        port
    }

    async fn answer(&self, mut stream: TcpStream) {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            match stream.read_u8().await {
                Ok(byte) => head.push(byte),
                Err(_) => return,
            }
        }
        let head = String::from_utf8(head).unwrap().to_lowercase();
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
        let mut body = vec![0; length.map_or(0, |length| length.parse().unwrap())];
        stream.read_exact(&mut body).await.unwrap();
        let mut words = head.split(' ');
        let (verb, path) = (words.next().unwrap(), words.next().unwrap().to_owned());
        let body = String::from_utf8(body).unwrap();
        self.requests.lock().unwrap().push(format!("{verb} {path}\n{body}"));
        let missing = || Answer::Raw("HTTP/1.1 404 No\r\ncontent-length: 0\r\n\r\n".to_owned());
        let answer = self.answers.lock().unwrap().get(&path).cloned().unwrap_or_else(missing);
        // The client may have hung up, of an answer that it does not like.
        match answer {
            Answer::Raw(text) => {
                let _gone = stream.write_all(text.as_bytes()).await;
                let _gone = stream.shutdown().await;
            }
            Answer::Drip => {
                let _gone =
                    stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 9999\r\n\r\n").await;
                while stream.write_all(b" ").await.is_ok() {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            }
            Answer::Silence => {
                let _gone = stream.read_u8().await;
            }
        }
    }

    /// Answers `path` with this document.
    pub fn document(&self, path: &str, text: &str) {
        let length = text.len();
        let answer = format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n{text}");
        self.answer_with(path, Answer::Raw(answer));
    }

    pub fn answer_with(&self, path: &str, answer: Answer) {
        self.answers.lock().unwrap().insert(path.to_owned(), answer);
    }

    /// The requests so far: verb, path and body.
    pub fn requests(&self) -> Vec<String> {
        self.requests.lock().unwrap().clone()
    }
}
