import { ComponentType } from 'preact'
import type { PageProps } from '../app'
import { Fleet } from './fleet'
import { WorkerPage } from './worker'

/** A page of the dashboard. One without a title is reached by links only. */
export interface Page { path: string; title?: string; admin?: boolean; show: ComponentType<PageProps> }

export const pages: Page[] = [
  { path: '', title: 'Fleet', show: Fleet },
  { path: 'workers', show: WorkerPage },
]
