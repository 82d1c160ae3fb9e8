//! A report as one HTML page: tables and plots as inline SVG, nothing loaded from elsewhere.

use std::fmt::Write as _;

use crate::report::{CURVE, Report, Run};

const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 260.0;
const LEFT: f64 = 64.0;
const BOTTOM: f64 = 36.0;
const TOP: f64 = 12.0;
/// Colours that stay apart for colour-blind readers (Okabe and Ito 2008).
const COLOURS: [&str; 8] = [
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999933",
];

const HEAD: &str = "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\"><title>Cairn replay</title><style>\
body{font:15px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:62rem;padding:0 1rem;color:#222}\
table{border-collapse:collapse;margin:1rem 0}td,th{padding:.25rem .7rem;text-align:right;border-bottom:1px solid #ddd}\
td:first-child,th:first-child{text-align:left}svg{width:100%;max-width:640px;height:auto}svg text{font-size:11px;fill:#444}\
h2{margin-top:2rem}.key span{margin-right:1.2rem}.key i{display:inline-block;width:.8rem;height:.8rem;margin-right:.35rem}\
</style></head><body>";

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// One line of a plot.
struct Line<'a> {
    colour: &'a str,
    points: Vec<(f64, f64)>,
}

/// A plot's axes.
struct Axes<'a> {
    x: (f64, f64),
    y: (f64, f64),
    x_title: &'a str,
    y_title: &'a str,
    /// Powers of ten on the x axis.
    log_x: bool,
    /// Moments to mark.
    marks: &'a [f64],
}

impl Axes<'_> {
    fn at(&self, (x, y): (f64, f64)) -> (f64, f64) {
        let scale = |value: f64| if self.log_x { value.max(1e-3).log10() } else { value };
        let (low, high) = (scale(self.x.0), scale(self.x.1));
        let right = (scale(x) - low) / (high - low).max(f64::MIN_POSITIVE);
        let up = (y - self.y.0) / (self.y.1 - self.y.0).max(f64::MIN_POSITIVE);
        let (width, height) = (WIDTH - LEFT - 12.0, HEIGHT - TOP - BOTTOM);
        (LEFT + right * width, HEIGHT - BOTTOM - up * height)
    }

    fn x_ticks(&self) -> Vec<f64> {
        if self.log_x {
            let powers = self.x.0.max(1e-3).log10().ceil() as i32..=self.x.1.max(1e-3).log10().floor() as i32;
            return powers.map(|power| 10f64.powi(power)).collect();
        }
        (0..=5)
            .map(|i| self.x.0 + (self.x.1 - self.x.0) * f64::from(i) / 5.0)
            .collect()
    }
}

fn number(value: f64) -> String {
    if value.abs() >= 10.0 || value == 0.0 {
        format!("{value:.0}")
    } else {
        format!("{value:.2}")
    }
}

fn plot(axes: &Axes<'_>, lines: &[Line<'_>]) -> String {
    let mut svg = format!("<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\">");
    for i in 0..=4 {
        let value = axes.y.0 + (axes.y.1 - axes.y.0) * f64::from(i) / 4.0;
        let (_, y) = axes.at((axes.x.0, value));
        let _ = write!(
            svg,
            "<path d=\"M{LEFT} {y:.1}H{:.1}\" stroke=\"#e4e4e4\"/><text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            WIDTH - 12.0,
            LEFT - 6.0,
            y + 4.0,
            number(value)
        );
    }
    for value in axes.x_ticks() {
        let (x, _) = axes.at((value, axes.y.0));
        let _ = write!(
            svg,
            "<text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
            HEIGHT - BOTTOM + 15.0,
            number(value)
        );
    }
    for mark in axes.marks {
        let (x, _) = axes.at((*mark, axes.y.0));
        let _ = write!(
            svg,
            "<path d=\"M{x:.1} {TOP}V{:.1}\" stroke=\"#888\" stroke-dasharray=\"4 3\"/><text x=\"{:.1}\" y=\"{:.1}\">fleet changes</text>",
            HEIGHT - BOTTOM,
            x + 4.0,
            TOP + 10.0
        );
    }
    for line in lines {
        let points: Vec<String> = line
            .points
            .iter()
            .map(|point| axes.at(*point))
            .map(|(x, y)| format!("{x:.1},{y:.1}"))
            .collect();
        let _ = write!(
            svg,
            "<polyline fill=\"none\" stroke=\"{}\" stroke-width=\"1.8\" points=\"{}\"/>",
            line.colour,
            points.join(" ")
        );
    }
    let _ = write!(
        svg,
        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text><text x=\"12\" y=\"{:.1}\" transform=\"rotate(-90 12 {:.1})\" \
         text-anchor=\"middle\">{}</text></svg>",
        (LEFT + WIDTH) / 2.0,
        HEIGHT - 4.0,
        escape(axes.x_title),
        HEIGHT / 2.0,
        HEIGHT / 2.0,
        escape(axes.y_title)
    );
    svg
}

fn curves(runs: &[(&str, &Run)]) -> String {
    let all = || runs.iter().flat_map(|(_, run)| run.ttft_curve_ms.iter().copied());
    let low = all().fold(f64::INFINITY, f64::min).max(0.1);
    let high = all().fold(1.0, f64::max);
    let axes = Axes {
        x: (low, high.max(low * 2.0)),
        y: (0.0, 100.0),
        x_title: "time to the first token, ms",
        y_title: "% of requests within it",
        log_x: true,
        marks: &[],
    };
    let lines: Vec<Line<'_>> = runs
        .iter()
        .map(|(colour, run)| Line {
            colour,
            points: run
                .ttft_curve_ms
                .iter()
                .zip(CURVE)
                .map(|(ms, share)| (*ms, share * 100.0))
                .collect(),
        })
        .collect();
    plot(&axes, &lines)
}

fn over_time(runs: &[(&str, &Run)], title: &str, of: impl Fn(&crate::Window) -> f64, top: Option<f64>) -> String {
    let windows = || {
        runs.iter()
            .flat_map(|(_, run)| run.windows.iter().filter(|window| window.requests > 0))
    };
    let end = windows().map(|window| window.at_s).fold(1.0, f64::max);
    let high = top.unwrap_or_else(|| windows().map(&of).fold(1.0, f64::max));
    let axes = Axes {
        x: (0.0, end),
        y: (0.0, high),
        x_title: "seconds from the trace's start",
        y_title: title,
        log_x: false,
        marks: runs.first().map_or(&[], |(_, run)| run.changes_s.as_slice()),
    };
    let lines: Vec<Line<'_>> = runs
        .iter()
        .map(|(colour, run)| Line {
            colour,
            points: run
                .windows
                .iter()
                .filter(|window| window.requests > 0)
                .map(|window| (window.at_s, of(window)))
                .collect(),
        })
        .collect();
    plot(&axes, &lines)
}

/// Colour, policy and named shares.
type Bars<'a> = (&'a str, &'a str, Vec<(String, f64)>);

/// Bars of shares, one row a policy.
fn bars(rows: &[Bars<'_>]) -> String {
    let mut out = String::from("<table>");
    for (colour, name, shares) in rows {
        let _ = write!(out, "<tr><td>{}</td><td style=\"text-align:left\">", escape(name));
        let most = shares.iter().map(|(_, share)| *share).fold(f64::MIN_POSITIVE, f64::max);
        for (label, share) in shares {
            let _ = write!(
                out,
                "<span title=\"{}: {:.1} %\" style=\"display:inline-block;vertical-align:bottom;width:18px;margin-right:2px;\
                 background:{colour};height:{:.0}px\"></span>",
                escape(label),
                share * 100.0,
                share / most * 48.0 + 1.0
            );
        }
        out.push_str("</td></tr>");
    }
    out.push_str("</table>");
    out
}

fn reasons(runs: &[(&str, &Run)]) -> String {
    let mut out = String::from("<table><tr><th>policy</th><th>reason</th><th>decisions</th></tr>");
    for (_, run) in runs {
        for (why, count) in &run.reasons {
            let _ = write!(
                out,
                "<tr><td>{}</td><td>{}</td><td>{count}</td></tr>",
                escape(&run.policy),
                escape(why)
            );
        }
        for (what, count) in [
            ("refused (429)", run.refused),
            ("sent back by a full engine", run.retries),
        ] {
            if count > 0 {
                let _ = write!(
                    out,
                    "<tr><td>{}</td><td>{what}</td><td>{count}</td></tr>",
                    escape(&run.policy)
                );
            }
        }
    }
    out.push_str("</table>");
    out
}

impl Report {
    /// The report as a page; plots show the first seed of each policy.
    #[must_use]
    pub fn html(&self) -> String {
        let mut runs: Vec<(&str, &Run)> = Vec::new();
        for run in &self.runs {
            if runs.iter().all(|(_, other)| other.policy != run.policy) {
                runs.push((COLOURS[runs.len() % COLOURS.len()], run));
            }
        }
        let mut page = String::from(HEAD);
        let _ = write!(
            page,
            "<h1>Replay of {}</h1><p>{}</p><pre>{}</pre><p class=\"key\">",
            escape(&self.trace),
            escape(&self.verdict),
            escape(&self.table())
        );
        for (colour, run) in &runs {
            let _ = write!(
                page,
                "<span><i style=\"background:{colour}\"></i>{}</span>",
                escape(&run.policy)
            );
        }
        page.push_str("</p><h2>Time to the first token</h2>");
        page.push_str(&curves(&runs));
        page.push_str(&over_time(
            &runs,
            "P90 of a window, ms",
            |window| window.ttft_p90_ms,
            None,
        ));
        let _ = write!(
            page,
            "<h2>Hits over time</h2><p>At most {:.1} % of all prompt tokens can be cached.</p>",
            self.oracle_hit * 100.0
        );
        page.push_str(&over_time(
            &runs,
            "% of prompt tokens",
            |window| window.hit * 100.0,
            Some(100.0),
        ));
        page.push_str("<h2>Computed tokens by engine</h2>");
        let rows: Vec<Bars<'_>> = runs
            .iter()
            .map(|(colour, run)| {
                let shares = run.work_share.iter().enumerate();
                let shares = shares.map(|(engine, share)| (format!("engine {engine}"), *share));
                (*colour, run.policy.as_str(), shares.collect())
            })
            .collect();
        page.push_str(&bars(&rows));
        page.push_str("<h2>Why requests went where they went</h2>");
        page.push_str(&reasons(&runs));
        page.push_str("</body></html>\n");
        page
    }
}
